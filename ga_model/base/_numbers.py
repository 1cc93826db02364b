"""Scalar arithmetic for weights, and slices of tensors, for each backend.

Scalars are tensors on TensorFlow and JAX. On PyTorch, where steps run eagerly, scalars that are
known without reading a tensor are Python numbers. On JAX they are float32 unless float64 is enabled
there. `keras.ops` supports float64 on TensorFlow only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from ga_model.base._context import ThreadValue
from ga_model.base._types import Scalar, Tensor

# Replaces a weight of 0 if there are samples: too small to change other weights in float64.
LEAST_WEIGHT = 2.0**-60


def sum_dtype(dtype: Any) -> str:
    """Return the dtype in which values of a dtype are summed: float64 for float64, else float32."""
    name: str = keras.backend.standardize_dtype(dtype)
    return name if name in ("float32", "float64") else "float32"


def widened(values: Tensor) -> Tensor:
    """Cast values to the dtype in which they are summed."""
    dtype = keras.backend.standardize_dtype(values.dtype)
    wide = sum_dtype(dtype)
    return values if dtype == wide else keras.ops.cast(values, wide)


def is_not(flag: Scalar) -> Scalar:
    """Return the negation of a bool scalar."""
    return not flag if isinstance(flag, bool) else ~flag


def without_gradient(value: Scalar) -> Scalar:
    """Return a scalar without gradient."""
    return keras.ops.stop_gradient(value) if keras.ops.is_tensor(value) else value


def at_least(value: Scalar, least: float) -> Scalar:
    """Return a scalar, or `least` if it is smaller. Nothing is computed if that is 0."""
    return where(value < least, least, value) if least else value


def at_least_minimum(weight: Scalar, rows: Scalar) -> Scalar:
    """Return a weight, or `LEAST_WEIGHT` if it is zero and there are samples."""
    return where((weight == 0) & (rows > 0), LEAST_WEIGHT, float64(weight))


def where_or_zero(flag: Scalar, value: Tensor | Scalar) -> Tensor | Scalar:
    """Return a value, or zero (False) of its type if a bool scalar is False."""
    if isinstance(value, bool):
        return flag & value
    is_tensor = keras.ops.is_tensor(value)
    return where(flag, value, keras.ops.zeros_like(value) if is_tensor else 0.0)


def int32(number: int) -> Scalar:
    """Return a number as an int32 scalar."""
    is_on_torch = keras.backend.backend() == "torch"
    return number if is_on_torch else keras.ops.convert_to_tensor(number, "int32")


def divided(tensor: Tensor, divisor: Scalar) -> Tensor:
    """Return `tensor / divisor`. May overwrite `tensor`: do not use it again."""
    if keras.backend.backend() != "torch":
        return tensor / like(tensor, divisor)
    is_one = not keras.ops.is_tensor(divisor) and divisor == 1.0
    return tensor if is_one else tensor.div_(like(tensor, divisor))


if keras.backend.backend() != "tensorflow":

    def shape_of(tensor: Tensor) -> tuple[Scalar, ...]:
        return tuple(tensor.shape)

    def rows_between(tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor[start:stop]


if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def float64(value: Scalar) -> Scalar:
        """Return a number as a float64 scalar."""
        if isinstance(value, (int, float)):  # `tf.cast` would convert it to float32 first
            return tf.constant(value, tf.float64)
        return tf.cast(value, tf.float64)

    def divide_or_zero(part: Tensor | Scalar, whole: Tensor | Scalar) -> Tensor | Scalar:
        """Return `part / whole`, or zero if `whole` is zero."""
        if not (tf.is_tensor(part) and tf.is_tensor(whole) and part.dtype == whole.dtype):
            part, whole = float64(part), float64(whole)
        return tf.math.divide_no_nan(part, whole)

    def like(tensor: Tensor, value: Scalar) -> Scalar:
        """Return a scalar in the dtype of the tensor that it is combined with."""
        return tf.cast(value, tensor.dtype)

    def shape_of(tensor: Tensor) -> tuple[Scalar, ...]:
        """Return the shape of a dense, ragged or sparse tensor; sizes unknown when a graph is
        traced are float64 scalars.
        """
        if isinstance(tensor, tf.SparseTensor):
            found = tensor.dense_shape
        elif isinstance(tensor, tf.RaggedTensor):
            found = [tensor.nrows(), *tensor.shape[1:]]
        elif not tf.is_tensor(tensor) or tensor.shape.is_fully_defined():
            return tuple(tensor.shape)
        else:
            found = tf.shape(tensor)
        number: Callable[[Scalar], Scalar] = int if tf.executing_eagerly() else float64
        return tuple(
            number(found[axis]) if size is None and found[axis] is not None else size
            for axis, size in enumerate(tensor.shape)
        )

    def dense(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a dense tensor of `shape`, whose row i is the sum of the values with index i."""
        return tf.math.unsorted_segment_sum(values, indices, shape[0])

    def rows_between(tensor: Tensor, start: int, stop: int) -> Tensor:
        """Return the rows from `start` up to `stop` of any tensor or array."""
        if isinstance(tensor, tf.SparseTensor):
            shape = [int(size) for size in tensor.dense_shape]
            start, stop, _ = slice(start, stop).indices(shape[0])
            size = [stop - start, *shape[1:]]
            return tf.sparse.slice(tensor, [start, *(0 for _ in shape[1:])], size)
        if not (isinstance(tensor, tf.Tensor) and tf.executing_eagerly()):
            return tensor[start:stop]
        start, stop, _ = slice(start, stop).indices(tensor.shape[0])
        pairs = (start, 0), (stop - start, -1)  # takes a tenth of the time of `tensor[start:stop]`
        begin, size = (_filled(*pair, tensor.shape.rank) for pair in pairs)
        return tf.raw_ops.Slice(input=tensor, begin=begin, size=size)

    @functools.lru_cache(maxsize=1024)
    def _filled(first: int, rest: int, rank: int) -> Tensor:
        """Return a vector of `rank` entries: `first`, followed by copies of `rest`."""
        with tf.device("CPU"):
            return tf.constant([first, *[rest] * (rank - 1)])

    def where(
        condition: Scalar, first: Tensor | Scalar, second: Tensor | Scalar
    ) -> Tensor | Scalar:
        """Return one of two values in their dtype, which `keras.ops.where` may change."""
        if not tf.is_tensor(first):
            of_number = tf.float64 if isinstance(first, float) else None
            first = tf.convert_to_tensor(first, getattr(second, "dtype", of_number))
        if not tf.is_tensor(second):
            second = tf.convert_to_tensor(second, first.dtype)
        return tf.where(condition, first, second)

    def added(total: Tensor, tensor: Tensor, shrink: Scalar, counts: Scalar = None) -> Tensor:
        """Return `total * shrink + tensor`, or `total` if `counts` is False, as for a NaN.

        May overwrite `total`: do not use it again.
        """
        result = _shrunk(total, shrink) + tensor
        # With a scalar condition, `Select` copies nothing; the operation of `tf.where` does.
        return result if counts is None else tf.raw_ops.Select(condition=counts, x=result, y=total)

    def _shrunk(total: Tensor, shrink: Scalar) -> Tensor:
        """Return `total * shrink`. A graph may skip it if `shrink` is 1, as it nearly always is."""
        if not tf.is_tensor(shrink) and shrink == 1.0:
            return total
        if not skips_by_one.get():
            return total * like(total, shrink)
        unequal, equal = tf.raw_ops.Switch(data=total, pred=tf.equal(shrink, 1.0))
        result = tf.raw_ops.Merge(inputs=[unequal * like(unequal, shrink), equal])[0]
        result.set_shape(total.shape)
        return result

    # Whether the graph that is traced runs on a CPU without XLA. There, a condition waits for
    # nothing, and reading an array costs most; XLA fuses the multiplication with the addition.
    skips_by_one = ThreadValue(False)

elif keras.backend.backend() == "jax":
    import jax
    import jax.numpy as jnp

    def float64(value: Scalar) -> Scalar:
        return jnp.asarray(value, jax.dtypes.canonicalize_dtype(jnp.float64))

    # Computed with rank 1: for `noting`, scalars of a step are candidates for its loss's divisor.

    def divide_or_zero(part: Tensor | Scalar, whole: Tensor | Scalar) -> Tensor | Scalar:
        part, whole = (jnp.asarray(value)[None] for value in (part, whole))
        return jnp.where(whole == 0, 0.0, part / jnp.where(whole == 0, 1.0, whole))[0]

    def like(tensor: Tensor, value: Scalar) -> Scalar:
        return jnp.asarray(value, jnp.result_type(tensor))

    def where(
        condition: Scalar, first: Tensor | Scalar, second: Tensor | Scalar
    ) -> Tensor | Scalar:
        condition, first, second = (jnp.asarray(v)[None] for v in (condition, first, second))
        return jnp.where(condition, first, second)[0]

    def added(total: Tensor, tensor: Tensor, shrink: Scalar, counts: Scalar = None) -> Tensor:
        result = total * like(total, shrink) + tensor
        return result if counts is None else where(counts, result, total)

else:
    import torch

    # Python numbers stay Python numbers: most weights are known without reading a tensor.

    def float64(value: Scalar) -> Scalar:
        if not torch.is_tensor(value):
            return float(value)
        return value.to(torch.float32 if value.device.type == "mps" else torch.float64)

    def divide_or_zero(part: Tensor | Scalar, whole: Tensor | Scalar) -> Tensor | Scalar:
        if torch.is_tensor(whole):  # may have an entry per channel
            return torch.where(whole == 0, 0.0, part / torch.where(whole == 0, 1.0, whole))
        return part / whole if whole else 0.0

    def like(tensor: Tensor, value: Scalar) -> Scalar:
        return value.to(tensor.dtype) if torch.is_tensor(value) else float(value)

    def where(
        condition: Scalar, first: Tensor | Scalar, second: Tensor | Scalar
    ) -> Tensor | Scalar:
        if not torch.is_tensor(condition):
            return first if condition else second
        if not (torch.is_tensor(first) or torch.is_tensor(second)):
            first = torch.tensor(first, dtype=torch.float64, device=condition.device)
        return torch.where(condition, first, second)

    def added(total: Tensor, tensor: Tensor, shrink: Scalar, counts: Scalar = True) -> Tensor:
        if torch.is_tensor(shrink) or shrink != 1.0:
            total.mul_(like(total, shrink))
        return total.add_(where(counts, tensor, 0.0))
