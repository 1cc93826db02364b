"""The noise of gradients on TensorFlow: estimates from microbatches, averaged in variables.

What is estimated stands in `_noise`. Under a strategy with R replicas gradients are those of a loss
divided by R (see `_weights`), so of a microbatch R^2 times the square counts. The window's gradient
is the sum over replicas of what each gives to its optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.replicas import _strategy
from ga_model.sums._noise import Averages, estimates
from ga_model.sums._rows import sum_dtype


class Squares(NamedTuple):
    """The contribution of one or several microbatches to the noise.

    Attributes:
        total: float64 scalar tensor, the sum of w_i * |g_i|^2, in the unit of the weights w_i.
        count: float64 scalar tensor, microbatches that have a weight.
    """

    total: Any
    count: Any

    @classmethod
    def of(cls, gradients: Sequence[Any], relative_weight: Any, optimizer: Any) -> Squares:
        """Return that of one microbatch.

        Args:
            gradients: one per variable, times `relative_weight`.
            relative_weight: float64 scalar tensor, the weight in the unit.
            optimizer: what the gradients are for. It knows how the loss was scaled.
        """
        norm = squared_norm(_unscaled(gradients, optimizer))
        return cls(
            # Without weight it is zero, whatever the gradients are.
            tf.math.divide_no_nan(norm, relative_weight),
            tf.cast(tf.not_equal(relative_weight, 0.0), tf.float64),
        )

    @classmethod
    def of_nothing(cls) -> Squares:
        return cls(tf.zeros((), tf.float64), tf.zeros((), tf.float64))

    def plus(self, other: Squares, shrink: Any) -> Squares:
        """Return the sum.

        Args:
            other: what is added.
            shrink: float64 scalar tensor, the unit of this one over that of the other; zero in a
                window that begins, where nothing counts that is left of the one before.
        """
        before = self.counted_if(tf.not_equal(shrink, 0.0))
        return Squares(before.total * shrink + other.total, before.count + other.count)

    def counted_if(self, condition: Any) -> Squares:
        """Return it, or zeros where `condition`, a bool scalar tensor, does not hold."""
        return Squares(
            tf.where(condition, self.total, 0.0),
            tf.where(condition, self.count, 0.0),
        )


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the sum of the squares of all entries: float64 scalar tensor.

    Args:
        gradients: tensors, `tf.IndexedSlices` and None. Rows of equal ids are summed first.
    """
    norms = [tf.zeros((), tf.float64)]
    for gradient in gradients:
        if gradient is None:
            continue
        if isinstance(gradient, tf.IndexedSlices):
            gradient = _rows_of_different_ids(gradient)
        gradient = tf.convert_to_tensor(gradient)
        half = tf.nn.l2_loss(tf.cast(gradient, sum_dtype(gradient.dtype)))
        norms.append(2.0 * tf.cast(half, tf.float64))
    return tf.add_n(norms)


def _rows_of_different_ids(slices: tf.IndexedSlices) -> tf.Tensor:
    """Return the sums of rows of equal ids, and zeros. XLA knows the shape: it is that of all."""
    order = tf.argsort(slices.indices)
    ids = tf.gather(slices.indices, order)
    is_new = tf.cast(tf.not_equal(ids[1:], ids[:-1]), tf.int32)
    # Of no rows there is no first one either.
    segments = tf.concat([tf.zeros_like(order[:1]), tf.cumsum(is_new)], axis=0)
    values = tf.cast(slices.values, sum_dtype(slices.values.dtype))
    return tf.math.unsorted_segment_sum(tf.gather(values, order), segments, tf.shape(ids)[0])


def _unscaled(gradients: Sequence[Any], optimizer: Any) -> Sequence[Any]:
    """Return gradients as they are without the scale that the optimizer gives to losses."""
    is_dynamic = hasattr(optimizer, "inner_optimizer")
    if not is_dynamic and optimizer.loss_scale_factor is None:
        return gradients
    scale = optimizer.scale_loss(tf.ones(()))
    return [None if gradient is None else _divided(gradient, scale) for gradient in gradients]


def _divided(gradient: Any, divisor: Any) -> Any:
    """Return a gradient over a scalar tensor, in the dtype that it is summed in."""
    if isinstance(gradient, tf.IndexedSlices):
        values = _divided(gradient.values, divisor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    gradient = tf.cast(gradient, sum_dtype(gradient.dtype))
    return gradient / tf.cast(divisor, gradient.dtype)


class Estimate:
    """The averages for one optimizer, in variables that the training step updates."""

    def __init__(self, decay: float) -> None:
        # Sums of what was seen, times what each still counts; the last entry is of ones.
        self._sums, self._decay, self._num_windows = _strategy.make_variables(
            lambda: [
                tf.zeros((4,), tf.float64),
                tf.constant(decay, tf.float64),
                tf.zeros((), tf.int64),
            ]
        )

    def restart(self) -> None:
        self._sums.assign(tf.zeros((4,), tf.float64))
        self._num_windows.assign(tf.zeros((), tf.int64))

    def set_decay(self, decay: float) -> None:
        self._decay.assign(tf.constant(decay, tf.float64))

    def update(self, whole: Any, share: Any, optimizer: Any) -> None:
        """Take a window in, before its update. Replicas communicate, and all have to call it.

        Args:
            whole: the `GradientSum` of this replica.
            share: the same as its share of the mean: see `GradientSum.of_replica`.
            optimizer: what makes the update.
        """
        replicas = float(_strategy.num_replicas())
        present = [gradient for gradient in share.gradients if gradient is not None]
        gradients = _strategy.sum_over_replicas([_divided(g, share.total) for g in present])
        squares = whole.squares.total * whole.unit * replicas**2
        totals = _strategy.sum_over_replicas(
            [tf.stack([squares, whole.squares.count, whole.total * whole.unit])]
        )
        squares, count, weight = tf.unstack(totals[0])
        norm = squared_norm(_unscaled(gradients, optimizer))
        trace, true_norm = estimates(squares, count, weight, norm)
        values = tf.stack([trace, true_norm, weight, tf.ones((), tf.float64)])
        # What is not finite is of an update that is skipped, or that ends the training.
        tells = tf.logical_and(count > 1.0, tf.reduce_all(tf.math.is_finite(values)))
        decay = self._decay.read_value()
        sums = self._sums.read_value()
        self._sums.assign(tf.where(tells, decay * sums + (1.0 - decay) * values, sums))
        self._num_windows.assign_add(tf.cast(tells, tf.int64))

    def averages(self) -> Averages:
        sums = _strategy.copies(self._sums)[0].numpy()
        number = int(_strategy.copies(self._num_windows)[0].numpy())
        if not number:
            return Averages.of_nothing()
        trace, norm, weight = (float(part) for part in sums[:3] / sums[3])
        return Averages(trace, norm, weight, number)
