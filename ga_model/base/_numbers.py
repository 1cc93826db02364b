"""Scalars for computing weights: tensors on TensorFlow and JAX, floats of Python on PyTorch.

A graph needs tensors. Where steps run eagerly, floats are the only float64 that Keras's backends
share: `keras.backend.result_type("float64", "float64")` is float32 on all but TensorFlow. On JAX
they are float32 unless it was told to use float64.
"""

from __future__ import annotations

import math
from typing import Any

import keras

# What a microbatch without weight counts beside others: nothing, in float64.
LEAST_WEIGHT = 2.0**-60


def sum_dtype(dtype: Any) -> str:
    """Return the dtype in which values of a dtype are summed: float32, or their wider one."""
    name: str = keras.backend.standardize_dtype(dtype)
    return name if name in ("float32", "float64") else "float32"


if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def float64(value: Any) -> Any:
        """Return a number as a scalar of float64."""
        if isinstance(value, (int, float)):  # `tf.cast` would take it through float32
            return tf.constant(value, tf.float64)
        return tf.cast(value, tf.float64)

    def share(part: Any, whole: Any) -> Any:
        """Return `part / whole`, or zero where `whole` is zero."""
        return tf.math.divide_no_nan(part, whole)

    def constant(value: Any) -> Any:
        """Return a scalar that is nothing to differentiate."""
        return tf.stop_gradient(value)

    def not_zero(weight: Any, rows: Any) -> Any:
        """Return a weight, or the least one where it is zero and there are rows."""
        is_zero = tf.equal(weight, tf.zeros_like(weight)) & tf.greater(rows, 0)
        return tf.where(is_zero, float64(LEAST_WEIGHT), float64(weight))

    def like(tensor: Any, value: Any) -> Any:
        """Return a scalar in the dtype of a tensor that it is multiplied with or added to."""
        return tf.cast(value, tensor.dtype)

    def is_not(flag: Any) -> Any:
        """Return the opposite of a bool scalar."""
        return tf.logical_not(flag)

    def power_of_two(number: Any) -> Any:
        """Return the power of two at or above a number >= 1, as a scalar of float64."""
        return 2.0 ** tf.math.ceil(tf.math.log(tf.cast(number, tf.float64)) / math.log(2.0))

    def where(condition: Any, first: Any, second: Any) -> Any:
        """Return one of two values, in their own dtype, which `keras.ops.where` may change."""
        return tf.where(condition, first, second)

elif keras.backend.backend() == "jax":
    import jax
    import jax.numpy as jnp

    def float64(value: Any) -> Any:
        return jnp.asarray(value, jax.dtypes.canonicalize_dtype(jnp.float64))

    # Of rank one at least: what is a scalar in a step may be what its loss is divided by.

    def share(part: Any, whole: Any) -> Any:
        part, whole = (jnp.asarray(value)[None] for value in (part, whole))
        return jnp.where(whole == 0, 0.0, part / jnp.where(whole == 0, 1.0, whole))[0]

    def constant(value: Any) -> Any:
        return jax.lax.stop_gradient(value)

    def not_zero(weight: Any, rows: Any) -> Any:
        return where(weight == 0, LEAST_WEIGHT if rows else 0.0, float64(weight))

    def like(tensor: Any, value: Any) -> Any:
        return jnp.asarray(value, jnp.result_type(tensor))

    def is_not(flag: Any) -> Any:
        return jnp.logical_not(flag)

    def power_of_two(number: Any) -> Any:
        return float(2 ** (int(number) - 1).bit_length())

    def where(condition: Any, first: Any, second: Any) -> Any:
        condition, first, second = (jnp.asarray(v)[None] for v in (condition, first, second))
        return jnp.where(condition, first, second)[0]

else:
    import torch

    def float64(value: Any) -> Any:
        return float(value)

    def share(part: Any, whole: Any) -> Any:
        return part / whole if whole else 0.0

    def constant(value: Any) -> Any:
        return value

    def not_zero(weight: Any, rows: Any) -> Any:
        return LEAST_WEIGHT if rows and not weight else weight

    def like(tensor: Any, value: Any) -> Any:
        return value.to(tensor.dtype) if hasattr(value, "to") else float(value)

    def is_not(flag: Any) -> Any:
        return not flag

    def power_of_two(number: Any) -> Any:
        return float(2 ** (int(number) - 1).bit_length())

    def where(condition: Any, first: Any, second: Any) -> Any:
        return torch.where(condition, first, second)
