"""The summed gradient of one variable: a tensor, or rows of a table."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ga_model.base._numbers import power_of_two
from ga_model.sums._places import Parts
from ga_model.sums._rows import Rows, sum_dtype


def scaled(gradient: Any, factor: Any) -> Any:
    """Return a gradient times a scalar tensor, in the dtype that it is summed in."""
    if gradient is None:
        return None
    if isinstance(gradient, Parts):
        return gradient.with_values(lambda values: scaled(values, factor))
    gradient = with_dtype(tf.convert_to_tensor(gradient))
    return gradient * tf.cast(factor, gradient.dtype)


def mean_of(gradient: Any, total: Any, dtype: Any) -> Any:
    """Return a sum divided by a scalar tensor, if there is one, in a dtype."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = mean_of(gradient.values, total, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if total is not None:
        gradient = gradient / tf.cast(total, gradient.dtype)
    return tf.cast(gradient, dtype)


def nothing_of(gradient: Any, variable: Any) -> Any:
    """Return what a gradient adds that is left out."""
    if isinstance(gradient, (Rows, Parts)):
        return Rows.none(variable)
    return tf.zeros_like(with_dtype(gradient))


def term_of(gradient: Any, variable: Any) -> Any:
    """Return a microbatch's gradient as what is summed."""
    if isinstance(gradient, Parts):
        return Rows.of(gradient, variable)
    return gradient if isinstance(gradient, Rows) else with_dtype(gradient)


def begun(gradient: Any, variable: Any, has_weight: Any) -> Any:
    """Return the gradient that a sum begins with, or nothing where it has no weight.

    Of a dense one nothing is a product with zero, in the same memory: a branch would hold more.

    Args:
        gradient: of the first microbatch.
        variable: its variable.
        has_weight: bool scalar tensor.
    """
    term = term_of(gradient, variable)
    if isinstance(term, Rows):
        return tf.cond(has_weight, lambda: term, lambda: nothing_of(gradient, variable))
    return tf.math.multiply_no_nan(term, tf.cast(has_weight, term.dtype))


def term_like(total: Any, gradient: Any, variable: Any) -> Any:
    """Return what is added to `total`.

    In another trace, or eagerly, a gradient may be of another kind, or left out.
    """
    if gradient is None:
        return nothing_of(total, variable)
    if not isinstance(total, Rows):
        gradient = with_slices(gradient, variable)
        if isinstance(gradient, tf.IndexedSlices):
            slices, num_rows = gradient, int(variable.shape[0])
            gradient = tf.math.unsorted_segment_sum(slices.values, slices.indices, num_rows)
        gradient = tf.convert_to_tensor(gradient)
        gradient.set_shape(total.shape)  # which that of a function's result may not be known to be
        return tf.cast(gradient, total.dtype)
    if not isinstance(gradient, (Rows, Parts)):
        gradient = Parts(None, tf.IndexedSlices(gradient, tf.range(variable.shape[0])))
    return term_of(gradient, variable)


def added(total: Any, term: Any, variable: Any) -> Any:
    """Return a sum with one more term."""
    return total.plus(term, variable) if isinstance(total, Rows) else total + term


def multiplied(total: Any, factor: Any, variable: Any) -> Any:
    """Return a sum times a scalar tensor."""
    if isinstance(total, Rows):
        return total.times(factor, variable)
    return total * tf.cast(factor, total.dtype)


def in_parts(gradient: Any) -> Any:
    """Return what a tape gives, with rows as the part of a microbatch."""
    return Parts.of(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def with_slices(gradient: Any, variable: Any) -> Any:
    """Return a gradient with rows as an optimizer takes them."""
    if isinstance(gradient, Parts):
        return gradient.slices()
    return gradient.slices(variable) if isinstance(gradient, Rows) else gradient


def padded(gradient: Any) -> Any:
    """Return rows with up to a quarter more of them: zeros, for an id that is there.

    Their number is then one of four between two powers of two, for each of which XLA compiles.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    count = tf.shape(gradient.indices, out_type=tf.int64)[0]
    least = power_of_two(tf.maximum(count, 1))
    step = tf.cast(tf.maximum(least / 8.0, 1.0), tf.int64)
    missing = -count % step
    ids = tf.concat([gradient.indices, tf.repeat(gradient.indices[:1], missing)], axis=0)
    others = tf.zeros([tf.rank(gradient.values) - 1, 2], tf.int64)
    paddings = tf.concat([[[tf.zeros((), tf.int64), missing]], others], axis=0)
    return tf.IndexedSlices(tf.pad(gradient.values, paddings), ids, gradient.dense_shape)


def with_dtype(gradient: Any) -> Any:
    """Return a dense gradient in the dtype that it is summed in."""
    return tf.cast(gradient, sum_dtype(gradient.dtype))
