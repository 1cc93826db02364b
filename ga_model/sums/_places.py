"""Which rows of a sparse gradient belong to samples, and which to positions they share.

Where an Embedding looks up ids of the samples, each lookup has a row of the gradient, and the full
batch has the rows of all microbatches. Where it looks up ids that do not come from the samples, as
`position_embedding(ops.arange(length))` does, there is a row for each place in the ids: the full
batch has no more of them than a microbatch, and adds up in each what it is for all samples. Which
it is matters to clipping and to optimizers that are not linear, as each row is taken alone.

The graph tells what ids come from (`_dependence`). Eagerly, all rows are taken for lookups, which
is told where it looks wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ga_model.base import _validate
from ga_model.base._context import ThreadValue
from ga_model.reading._dependence import dependence_of, is_made_for_rows

_NAME = "ids_of_places"  # of an operation: that is what stays with ids that go through a tape

_told_of: set[int] = set()  # ids of variables

has_columns = ThreadValue(False)  # whether the batch that runs has sparse inputs


class Parts(NamedTuple):
    """The rows of one microbatch's gradient.

    Attributes:
        lookups: `tf.IndexedSlices`, a row for each lookup of the samples, or None.
        places: `tf.IndexedSlices`, a row for each place that they share, or None.
    """

    lookups: Any
    places: Any

    @classmethod
    def of(cls, slices: tf.IndexedSlices) -> Parts:
        """Return the rows that a tape gave, where a table may have been looked up several times."""
        if not tf.is_symbolic_tensor(slices.indices):
            return cls(slices, None)
        pieces = _pieces(slices.indices)
        try:
            flags = [_is_of_places(piece) for piece in pieces]
        except Exception:  # of a graph that is not what it is taken for
            _validate.warn(_unread_ids_message(slices.indices))
            return cls(slices, None)
        if all(flags):
            return cls(None, slices)
        if not any(flags):
            return cls(slices, None)
        values = tf.split(slices.values, [tf.shape(piece)[0] for piece in pieces])

        def part(of_places: bool) -> tf.IndexedSlices:
            numbers = [i for i, flag in enumerate(flags) if flag == of_places]
            return tf.IndexedSlices(
                tf.concat([values[i] for i in numbers], 0),
                tf.concat([pieces[i] for i in numbers], 0),
                slices.dense_shape,
            )

        return cls(part(False), part(True))

    @property
    def shape(self) -> tf.TensorShape:
        """That of the variable."""
        return next(part.shape for part in self if part is not None)

    def slices(self) -> tf.IndexedSlices:
        """Return all rows as a gradient."""
        if self.lookups is None or self.places is None:
            return self.places if self.lookups is None else self.lookups
        return tf.IndexedSlices(
            tf.concat([part.values for part in self], 0),
            tf.concat([part.indices for part in self], 0),
            self.lookups.dense_shape,
        )

    def with_values(self, function: Callable[[Any], Any]) -> Parts:
        """Return the rows with what a function of their values gives."""

        def changed(part: Any) -> Any:
            if part is None:
                return None
            return tf.IndexedSlices(function(part.values), part.indices, part.dense_shape)

        return Parts(changed(self.lookups), changed(self.places))


def marked(indices: Any) -> Any:
    """Return ids of places so that `Parts.of` knows them, in the same graph."""
    return tf.identity(indices, name=_NAME)


def _pieces(indices: Any) -> list[Any]:
    """Return the ids of each lookup. A tape puts them one behind the other."""
    op = indices.op
    if op.type != "ConcatV2" or indices.shape.rank != 1:
        return [indices]
    return [piece for part in op.inputs[:-1] for piece in _pieces(part)]


def _is_of_places(ids: Any) -> bool:
    """Return whether ids do not come from samples, or have one row each however often they do."""
    if ids.op.name.split("/")[-1].startswith(_NAME):
        return True
    if ids.op.type == "Reshape":  # the ids of a lookup are of any shape
        ids = ids.op.inputs[0]
    if ids.op.type.startswith("Unique"):  # TensorFlow has added up lookups of equal ids
        return True
    return not (any(dependence_of(ids)) or is_made_for_rows(ids))


def warn_of_places(before: np.ndarray, ids: np.ndarray, variable: Any) -> None:
    """Warn, once per variable, if two microbatches have rows that look like those of places.

    Both have looked up 0, 1, 2 and so on: that is what positions are, and what samples are not, in
    one microbatch after the other. Or the inputs are sparse, and both have rows of a column, each
    at most one: where a layer multiplies by such inputs, a column has one row for all samples.

    Args:
        before: the ids of the microbatches before.
        ids: those of the next one.
        variable: the table.
    """
    if len(ids) == 0 or id(variable) in _told_of:
        return
    places = np.arange(len(ids))
    path = getattr(variable, "path", variable.name)
    if len(ids) > 1 and all(np.array_equal(part, places) for part in (ids, before[-len(ids) :])):
        message = positions_message(path, len(ids))
    elif has_columns.get() and _are_unique(before) and _are_unique(ids) and {*before} & {*ids}:
        message = _columns_message(path)
    else:
        return
    _told_of.add(id(variable))
    weakref.finalize(variable, _told_of.discard, id(variable))
    _validate.warn(message)


def _are_unique(ids: np.ndarray) -> bool:
    return len(np.unique(ids)) == len(ids)


def positions_message(path: str, number: int) -> str:
    return (
        "In eager mode, a sparse gradient of positions is added once per microbatch; on the full "
        "batch it is added once. Clipping, and optimizers such as Adam, then make a different "
        f"update. Received: microbatches that all look up the ids 0 to {number - 1} in {path!r}. "
        "If these are positions, train without `run_eagerly=True`; in your own loop, take the "
        "gradients and call `GradientAccumulator.add` in one `tf.function`."
    )


def _unread_ids_message(ids: Any) -> str:
    return (
        "Whether a sparse gradient is of samples or of positions is read from the graph. "
        f"Received: one whose ids come from {ids.op.type!r} in a graph that cannot be read. It is "
        "taken for one of samples, which is added once per microbatch; if it is one of positions, "
        "clipping, and optimizers such as Adam, make a different update than on the full batch."
    )


def _columns_message(path: str) -> str:
    return (
        "In eager mode, a sparse gradient of the columns of sparse inputs is added once per "
        "microbatch; on the full batch it is added once. Clipping, and optimizers such as Adam, "
        f"then make a different update. Received: sparse inputs, and sparse gradients of {path!r}. "
        "If a layer multiplies by these inputs, train without `run_eagerly=True`."
    )
