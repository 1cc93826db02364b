"""Sums of sparse gradients: lists of rows.

The gradient of an Embedding has a row for each id that was looked up, and none for the rest of the
table. Plain Keras hands such rows to the optimizer as they are, equal ids several times, and
adaptive optimizers treat these in a way of their own. So the sum of two such gradients is the one
behind the other: that is what the whole batch has, and it costs what the rows cost and not what the
table does. The rows are kept as lists of tensors (`_lists`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from ga_model import _lists


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
        count: int64 scalar tensor, all rows together.
    """

    values: Any
    indices: Any
    count: Any

    @classmethod
    def of(cls, slices: tf.IndexedSlices, variable: Any) -> Rows:
        """Return the rows of one gradient."""
        values = tf.cast(slices.values, sum_dtype(variable.dtype))
        indices = tf.cast(slices.indices, tf.int64)
        return cls(
            _lists.pushed(_values(variable), values),
            _lists.pushed(_indices(), indices),
            tf.shape(indices, out_type=tf.int64)[0],
        )

    @classmethod
    def none(cls, variable: Any) -> Rows:
        """Return no rows of a variable's gradient."""
        return cls(_values(variable), _indices(), tf.zeros((), tf.int64))

    def plus(self, more: Rows, variable: Any) -> Rows:
        """Return these rows and more behind them."""
        return Rows(
            _lists.joined(self.values, more.values, sum_dtype(variable.dtype)),
            _lists.joined(self.indices, more.indices, tf.int64),
            self.count + more.count,
        )

    def times(self, factor: Any, variable: Any) -> Rows:
        """Return the rows multiplied by a scalar tensor."""
        slices = self.slices(variable)
        values = slices.values * tf.cast(factor, slices.values.dtype)
        return Rows.of(tf.IndexedSlices(values, slices.indices), variable)

    def slices(self, variable: Any) -> tf.IndexedSlices:
        """Return the rows as a gradient."""
        values = _lists.concatenated(self.values, sum_dtype(variable.dtype), variable.shape[1:])
        indices = _lists.concatenated(self.indices, tf.int64, ())
        return tf.IndexedSlices(values, indices, tf.constant(tuple(variable.shape), tf.int64))

    def bounded(self, variable: Any) -> Rows:
        """Return the rows; if they are many more than the variable's, those of equal ids summed.

        Then they are all of the variable's rows, a dense gradient. A quarter more may be there,
        which makes the sums rare: their cost, spread over what is added, is that of its rows.
        """
        num_rows = int(variable.shape[0])

        def summed() -> Rows:
            slices = self.slices(variable)
            table = tf.math.unsorted_segment_sum(slices.values, slices.indices, num_rows)
            every = tf.range(num_rows, dtype=tf.int64)
            return Rows.of(tf.IndexedSlices(table, every), variable)

        is_long = self.count > num_rows + num_rows // 4
        return tf.cond(is_long, summed, lambda: self)  # type: ignore[no-any-return]


def _values(variable: Any) -> Any:
    return _lists.empty(sum_dtype(variable.dtype), [None, *variable.shape[1:]])


def _indices() -> Any:
    return _lists.empty(tf.int64, [None])
