"""Sums of sparse gradients: lists of rows.

The gradient of an Embedding has a row for each id that was looked up, and none for the rest of the
table. Plain Keras hands such rows to the optimizer as they are, equal ids several times, and
adaptive optimizers treat these in a way of their own. So the sum of two such gradients is the one
behind the other: that is what the full batch has, and it costs what the rows cost and not what the
table does. Only rows of places that samples share (`_places`) are added one by one. The rows are
kept as lists of tensors (`_lists`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.graphs import _lists
from ga_model.sums._places import Parts, marked, warn_of_places


def sum_dtype(dtype: Any) -> tf.DType:
    """Return what gradients of a dtype are summed in: float32 for float16 and bfloat16."""
    dtype = tf.as_dtype(dtype)
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


class Rows(NamedTuple):
    """The rows of one variable's gradients.

    Attributes:
        values: variant scalar tensor, a list of tensors of shape (rows, *variable.shape[1:]), in
            the dtype that the variable's gradients are summed in.
        indices: variant scalar tensor, a list of int64 tensors of shape (rows,).
        count: int64 scalar tensor, all rows in these lists together.
        place_values, place_indices: the same of places, lists of one tensor or none.
    """

    values: Any
    indices: Any
    count: Any
    place_values: Any
    place_indices: Any

    @classmethod
    def of(cls, parts: Parts, variable: Any) -> Rows:
        """Return the rows of one gradient."""
        dtype, count = sum_dtype(variable.dtype), tf.zeros((), tf.int64)

        def lists_of(slices: Any) -> tuple[Any, Any]:
            if slices is None:
                return _pushed(dtype, variable.shape[1:], None, None)
            values, indices = tf.cast(slices.values, dtype), tf.cast(slices.indices, tf.int64)
            return _pushed(dtype, variable.shape[1:], values, indices)

        if parts.lookups is not None:
            count = tf.shape(parts.lookups.indices, out_type=tf.int64)[0]
        values, indices = lists_of(parts.lookups)
        return cls(values, indices, count, *lists_of(parts.places))

    @classmethod
    def none(cls, variable: Any) -> Rows:
        """Return no rows of a variable's gradient."""
        return cls.of(Parts(None, None), variable)

    def plus(self, more: Rows, variable: Any) -> Rows:
        """Return these rows and more behind them, with those of equal places added."""
        if tf.executing_eagerly():
            warn_of_places(_ids(self.indices).numpy(), _ids(more.indices).numpy(), variable)
        dtype = sum_dtype(variable.dtype)
        lists = self.place_values, self.place_indices, more.place_values, more.place_indices
        return Rows(
            _lists.joined(self.values, more.values, dtype),
            _lists.joined(self.indices, more.indices, tf.int64),
            self.count + more.count,
            *_sum_of_places(dtype, tuple(variable.shape[1:]))(*lists),
        )

    def times(self, factor: Any, variable: Any) -> Rows:
        """Return the rows multiplied by a scalar tensor."""
        parts = self._parts(variable)
        factor = tf.cast(factor, sum_dtype(variable.dtype))
        return Rows.of(parts.with_values(lambda values: values * factor), variable)

    def slices(self, variable: Any) -> tf.IndexedSlices:
        """Return the rows as a gradient, of which `Parts.of` tells the places."""
        dtype = sum_dtype(variable.dtype)
        values = _lists.joined(self.values, self.place_values, dtype)
        ids = tf.concat([_ids(self.indices), marked(_ids(self.place_indices))], 0)
        return _slices(_lists.concatenated(values, dtype, variable.shape[1:]), ids, variable)

    def bounded(self, variable: Any) -> Rows:
        """Return the rows; if lookups are many more than the variable's, those of equal ids summed.

        Then they are all of the variable's rows, a dense gradient. A quarter more may be there,
        which makes the sums rare: their cost, spread over what is added, is that of its rows.
        """
        num_rows = int(variable.shape[0])

        def summed() -> Rows:
            lookups, places = self._parts(variable)
            table = tf.math.unsorted_segment_sum(lookups.values, lookups.indices, num_rows)
            every = _slices(table, tf.range(num_rows, dtype=tf.int64), variable)
            return Rows.of(Parts(every, places), variable)

        return tf.cond(self.is_long(variable), summed, lambda: self)  # type: ignore[no-any-return]

    def is_long(self, variable: Any) -> Any:
        """Return whether `bounded` sums lookups, a bool scalar tensor."""
        num_rows = int(variable.shape[0])
        return self.count > num_rows + num_rows // 4

    def _parts(self, variable: Any) -> Parts:
        """Return the rows of either kind, of which there may be none."""
        dtype, shape = sum_dtype(variable.dtype), variable.shape[1:]
        lists = (self.values, self.indices), (self.place_values, self.place_indices)
        parts = [(_lists.concatenated(values, dtype, shape), _ids(ids)) for values, ids in lists]
        return Parts(*(_slices(values, ids, variable) for values, ids in parts))


@functools.cache
def _sum_of_places(dtype: tf.DType, shape: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function of the lists of places of two `Rows`, which gives those of their sum.

    A graph has it in several branches, each as one operation.

    Args:
        dtype: of the values.
        shape: of a row.
    """

    def total(values: Any, indices: Any, more_values: Any, more_indices: Any) -> tuple[Any, Any]:
        numbers, ids = _united(_ids(indices), _ids(more_indices))
        values = _lists.concatenated(_lists.joined(values, more_values, dtype), dtype, shape)
        values = tf.math.unsorted_segment_sum(values, numbers, tf.size(ids))
        return _pushed(dtype, shape, values, ids)

    signature = [tf.TensorSpec((), tf.variant)] * 4
    return tf.function(total, input_signature=signature, autograph=False)  # type: ignore[no-any-return]


def _united(ids: Any, more: Any) -> tuple[Any, Any]:
    """Return the ids of all places, and before them which place each of some ids and more has.

    Ids that are the same in the same order have the same places. Batches of a window may also be of
    different lengths, and sparse inputs have other columns. Then each id has its place, if none is
    there twice. Of anything else it is not known to be the same, and it has places of its own.
    """
    count, more_count = tf.size(ids), tf.size(more)
    least = tf.minimum(count, more_count)
    is_same_count = tf.equal(count, more_count)
    is_same = is_same_count & tf.reduce_all(tf.equal(ids[:least], more[:least]))
    both = tf.concat([ids, more], 0)

    def by_id_or_apart() -> tuple[Any, Any]:
        different, numbers = tf.unique(both)
        are_unique = [tf.equal(tf.size(tf.unique(part)[0]), tf.size(part)) for part in (ids, more)]
        is_by_id = tf.reduce_all(are_unique)
        return tf.cond(  # type: ignore[no-any-return]
            is_by_id,
            lambda: (numbers, different),
            lambda: (tf.range(count + more_count), both),
        )

    return tf.cond(  # type: ignore[no-any-return]
        is_same, lambda: (tf.tile(tf.range(count), [2]), ids), by_id_or_apart
    )


def _pushed(dtype: tf.DType, shape: Any, values: Any, indices: Any) -> tuple[Any, Any]:
    """Return lists of values and of indices, or without any if they are None."""
    lists = _lists.empty(dtype, [None, *shape]), _lists.empty(tf.int64, [None])
    if values is None:
        return lists
    return _lists.pushed(lists[0], values), _lists.pushed(lists[1], indices)


def _ids(indices: Any) -> Any:
    return _lists.concatenated(indices, tf.int64, ())


def _slices(values: Any, indices: Any, variable: Any) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, indices, tf.constant(tuple(variable.shape), tf.int64))
