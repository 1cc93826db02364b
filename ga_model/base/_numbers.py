"""Scalars for computing weights.

They are tensors on TensorFlow and JAX. On PyTorch, where steps run eagerly, numbers that are known
without a look at tensors are Python's own. On JAX they are float32 unless it was told to use
float64; `keras.ops` knows no float64 but on TensorFlow.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from ga_model.base._context import ThreadValue

# The weight of a microbatch without any, which adds nothing to other weights in float64.
LEAST_WEIGHT = 2.0**-60


def sum_dtype(dtype: Any) -> str:
    """Return the dtype in which values of a dtype are summed: float32, or their wider one."""
    name: str = keras.backend.standardize_dtype(dtype)
    return name if name in ("float32", "float64") else "float32"


def widened(values: Any) -> Any:
    """Return values in the dtype that they are summed in."""
    dtype = keras.backend.standardize_dtype(values.dtype)
    wide = sum_dtype(dtype)
    return values if dtype == wide else keras.ops.cast(values, wide)


def is_not(flag: Any) -> Any:
    """Return the opposite of a bool scalar."""
    return not flag if isinstance(flag, bool) else ~flag


def constant(value: Any) -> Any:
    """Return a scalar without its gradient."""
    return keras.ops.stop_gradient(value) if keras.ops.is_tensor(value) else value


def not_zero(weight: Any, rows: Any) -> Any:
    """Return a weight, or the least one where it is zero and there are rows."""
    return where((weight == 0) & (rows > 0), LEAST_WEIGHT, float64(weight))


def if_so(flag: Any, value: Any) -> Any:
    """Return a value, or zero of its kind where a bool scalar is false."""
    if isinstance(value, bool):
        return flag & value
    is_tensor = keras.ops.is_tensor(value)
    return where(flag, value, keras.ops.zeros_like(value) if is_tensor else 0.0)


if keras.backend.backend() != "tensorflow":

    def shape_of(tensor: Any) -> tuple[Any, ...]:
        return tuple(tensor.shape)

    def rows_between(tensor: Any, start: int, stop: int) -> Any:
        return tensor[start:stop]


if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def float64(value: Any) -> Any:
        """Return a number as a scalar of float64."""
        if isinstance(value, (int, float)):  # `tf.cast` would take it through float32
            return tf.constant(value, tf.float64)
        return tf.cast(value, tf.float64)

    def share(part: Any, whole: Any) -> Any:
        """Return `part / whole`, or zero where `whole` is zero."""
        if not (tf.is_tensor(part) and tf.is_tensor(whole) and part.dtype == whole.dtype):
            part, whole = float64(part), float64(whole)
        return tf.math.divide_no_nan(part, whole)

    def like(tensor: Any, value: Any) -> Any:
        """Return a scalar in the dtype of a tensor that it is multiplied with or added to."""
        return tf.cast(value, tensor.dtype)

    def shape_of(tensor: Any) -> tuple[Any, ...]:
        """Return the shape of a dense, ragged or sparse tensor. Sizes that a graph does not know
        are scalars of float64.
        """
        if isinstance(tensor, tf.SparseTensor):
            found = tensor.dense_shape
        elif isinstance(tensor, tf.RaggedTensor):
            found = [tensor.nrows(), *tensor.shape[1:]]
        elif not tf.is_tensor(tensor) or tensor.shape.is_fully_defined():
            return tuple(tensor.shape)
        else:
            found = tf.shape(tensor)
        number: Any = int if tf.executing_eagerly() else float64
        return tuple(
            number(found[axis]) if size is None and found[axis] is not None else size
            for axis, size in enumerate(tensor.shape)
        )

    def dense(values: Any, indices: Any, shape: Any) -> Any:
        """Return a table of a shape, whose rows are sums of the values with their index."""
        return tf.math.unsorted_segment_sum(values, indices, shape[0])

    def rows_between(tensor: Any, start: int, stop: int) -> Any:
        """Return the rows of any tensor or array from `start` up to `stop`."""
        if isinstance(tensor, tf.SparseTensor):
            shape = [int(size) for size in tensor.dense_shape]
            start, stop, _ = slice(start, stop).indices(shape[0])
            size = [stop - start, *shape[1:]]
            return tf.sparse.slice(tensor, [start, *(0 for _ in shape[1:])], size)
        if not (isinstance(tensor, tf.Tensor) and tf.executing_eagerly()):
            return tensor[start:stop]
        start, stop, _ = slice(start, stop).indices(tensor.shape[0])
        pairs = (start, 0), (stop - start, -1)  # a tenth of the time of an index
        begin, size = (_filled(*pair, tensor.shape.rank) for pair in pairs)
        return tf.raw_ops.Slice(input=tensor, begin=begin, size=size)

    @functools.lru_cache(maxsize=1024)
    def _filled(first: int, others: int, rank: int) -> Any:
        """Return a vector of `rank` entries: the first, then the others, which are equal."""
        with tf.device("CPU"):
            return tf.constant([first, *[others] * (rank - 1)])

    def where(condition: Any, first: Any, second: Any) -> Any:
        """Return one of two values, in their own dtype, which `keras.ops.where` may change."""
        if not tf.is_tensor(first):
            of_number = tf.float64 if isinstance(first, float) else None
            first = tf.convert_to_tensor(first, getattr(second, "dtype", of_number))
        if not tf.is_tensor(second):
            second = tf.convert_to_tensor(second, first.dtype)
        return tf.where(condition, first, second)

    def int32(number: int) -> Any:
        """Return a number as a scalar of int32."""
        return tf.constant(number, tf.int32)

    def added(total: Any, tensor: Any, shrink: Any, counts: Any = None) -> Any:
        """Return `total * shrink + tensor`, or `total` if `counts` is False, as for a NaN.

        The total is not to be used again.
        """
        result = _shrunk(total, shrink) + tensor
        # Of a scalar condition this operation copies nothing, as that of `tf.where` does.
        return result if counts is None else tf.raw_ops.Select(condition=counts, x=result, y=total)

    def _shrunk(total: Any, shrink: Any) -> Any:
        """Return `total * shrink`. As this is nearly always the total, a graph may skip it."""
        if not tf.is_tensor(shrink) and shrink == 1.0:
            return total
        if not skips_by_one.get():
            return total * like(total, shrink)
        other, same = tf.raw_ops.Switch(data=total, pred=tf.equal(shrink, 1.0))
        found = tf.raw_ops.Merge(inputs=[other * like(other, shrink), same])[0]
        found.set_shape(total.shape)
        return found

    # Whether the graph that is being made runs on a CPU, where a condition waits for nothing and an
    # array that is read costs most, and as it is: XLA makes one operation of several.
    skips_by_one = ThreadValue(False)

    def divided(tensor: Any, divisor: Any) -> Any:
        """Return `tensor / divisor`. The tensor is not to be used again."""
        return tensor / like(tensor, divisor)

elif keras.backend.backend() == "jax":
    import jax
    import jax.numpy as jnp

    def float64(value: Any) -> Any:
        return jnp.asarray(value, jax.dtypes.canonicalize_dtype(jnp.float64))

    # Computed in rank one: `noting` takes scalars of a step for what its loss may be divided by.

    def share(part: Any, whole: Any) -> Any:
        part, whole = (jnp.asarray(value)[None] for value in (part, whole))
        return jnp.where(whole == 0, 0.0, part / jnp.where(whole == 0, 1.0, whole))[0]

    def like(tensor: Any, value: Any) -> Any:
        return jnp.asarray(value, jnp.result_type(tensor))

    def where(condition: Any, first: Any, second: Any) -> Any:
        condition, first, second = (jnp.asarray(v)[None] for v in (condition, first, second))
        return jnp.where(condition, first, second)[0]

    def int32(number: int) -> Any:
        return jnp.asarray(number, "int32")

    def added(total: Any, tensor: Any, shrink: Any, counts: Any = None) -> Any:
        result = total * like(total, shrink) + tensor
        return result if counts is None else where(counts, result, total)

    def divided(tensor: Any, divisor: Any) -> Any:
        return tensor / like(tensor, divisor)

else:
    import torch

    # Python's own numbers stay so: most weights are known without waiting for a tensor's value.

    def float64(value: Any) -> Any:
        if not torch.is_tensor(value):
            return float(value)
        return value.to(torch.float32 if value.device.type == "mps" else torch.float64)

    def share(part: Any, whole: Any) -> Any:
        if torch.is_tensor(whole):  # perhaps one for each channel
            return torch.where(whole == 0, 0.0, part / torch.where(whole == 0, 1.0, whole))
        return part / whole if whole else 0.0

    def like(tensor: Any, value: Any) -> Any:
        return value.to(tensor.dtype) if torch.is_tensor(value) else float(value)

    def where(condition: Any, first: Any, second: Any) -> Any:
        if not torch.is_tensor(condition):
            return first if condition else second
        if not (torch.is_tensor(first) or torch.is_tensor(second)):
            first = torch.tensor(first, dtype=torch.float64, device=condition.device)
        return torch.where(condition, first, second)

    def int32(number: int) -> Any:
        return number

    def added(total: Any, tensor: Any, shrink: Any, counts: Any = True) -> Any:
        if torch.is_tensor(shrink) or shrink != 1.0:
            total.mul_(like(total, shrink))
        return total.add_(where(counts, tensor, 0.0))

    def divided(tensor: Any, divisor: Any) -> Any:
        is_one = not torch.is_tensor(divisor) and divisor == 1.0
        return tensor if is_one else tensor.div_(like(tensor, divisor))
