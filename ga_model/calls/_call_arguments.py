"""The arguments of a call: which have a batch axis, and are split into microbatches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ga_model.base._internals import mask_of, set_mask
from ga_model.base._internals_tf import is_followed
from ga_model.graphs._microbatch import Batch, as_tensor, rows_of
from ga_model.hearing._splitting import NotByRowsError
from ga_model.reading._dependence import dependence_of


class Arguments:
    """The arguments of a call: tensors of samples, tensors that all samples share, and the rest.

    Args:
        args, kwargs: the arguments, nests of anything.
        batch_rows: samples of the step's batch: int64 scalar tensor.
        size: samples of it per microbatch.

    Attributes:
        batch: the tensors of samples, to be split.
        shared: the other tensors.

    Raises:
        NotByRowsError: there are no tensors of samples, or it is not known which they are.
    """

    def __init__(self, args: Any, kwargs: Any, batch_rows: Any, size: Any) -> None:
        self._nest = (args, kwargs)
        self._flat = tf.nest.flatten(self._nest)
        self._numbers = [i for i, leaf in enumerate(self._flat) if tf.is_tensor(leaf)]
        tensors = [as_tensor(self._flat[i]) for i in self._numbers]
        masks = [mask_of(tensor) for tensor in tensors]
        self._masked = [number for number, mask in enumerate(masks) if mask is not None]
        tensors += [mask for mask in masks if mask is not None]
        self._has_rows = _which_have_rows(tensors)
        rows = [tensor for tensor, has_rows in zip(tensors, self._has_rows) if has_rows]
        self.shared = [tensor for tensor, has_rows in zip(tensors, self._has_rows) if not has_rows]
        counts = tf.stack([rows_of(tensor) for tensor in rows])
        most = tf.reduce_max(counts)
        # Several samples of a call may come of one of the batch, as where two views are stacked.
        per_row = tf.maximum(batch_rows, 1)
        alike = tf.maximum((size * most + per_row - 1) // per_row, size)
        self.is_split = tf.reduce_all(tf.equal(counts, counts[0]))
        self.batch = Batch(rows, tf.where(self.is_split, alike, most), is_checked=False)

    @property
    def kind(self) -> str:
        """What tells this call from others of the same layer: all but the tensors' values."""
        flat = [(t.dtype, t.shape[1:]) if tf.is_tensor(t) else t for t in self._flat]
        return repr((flat, tf.nest.map_structure(lambda _: 0, self._nest)))

    def packed(self, rows: list[Any], shared: list[Any]) -> tuple[Any, Any]:
        """Return the arguments with these tensors of samples and shared ones."""
        of_rows, others = iter(rows), iter(shared)
        tensors = [next(of_rows if has_rows else others) for has_rows in self._has_rows]
        for number, mask in zip(self._masked, tensors[len(self._numbers) :]):
            tensors[number] = tf.identity(tensors[number])
            set_mask(tensors[number], mask)
        flat = list(self._flat)
        for i, tensor in zip(self._numbers, tensors):
            flat[i] = tensor
        return tf.nest.pack_sequence_as(self._nest, flat)  # type: ignore[no-any-return]


def _which_have_rows(tensors: list[Any]) -> list[bool]:
    """Return which tensors have a sample in each entry of axis 0.

    Anything that follows from the data does, and what is drawn at random. What follows from
    weights, constants and shapes may be a table that all samples share, or may not.
    """
    composites = [t for t in tensors if not isinstance(t, tf.Tensor)]
    if any(map(is_followed, tf.nest.flatten(composites, expand_composites=True))):
        raise NotByRowsError("a ragged or sparse input needs a gradient")
    lengths = [t.shape[0] if t.shape.rank else 1 for t in tensors]
    is_row = [length != 1 for length in lengths]
    if not tf.executing_eagerly():
        pairs = zip(tensors, is_row)
        flat = [tf.nest.flatten(t, expand_composites=True)[0] if yes else t for t, yes in pairs]
        follows = [yes and dependence_of(t).on_values for t, yes in zip(flat, is_row)]
        known = {length for length, yes in zip(lengths, follows) if yes}
        for i, length in enumerate(lengths):
            # A table has a length of its own, which is known.
            if is_row[i] and not follows[i]:
                if known and (length is None or length in known):
                    raise NotByRowsError("it is unclear which of its inputs have a batch axis")
                is_row[i] = False
    lengths = [length for length, yes in zip(lengths, is_row) if yes]
    if not lengths:
        raise NotByRowsError("")
    if len(set(lengths)) > 1:
        raise NotByRowsError(f"its inputs have different numbers of samples {lengths}")
    return is_row
