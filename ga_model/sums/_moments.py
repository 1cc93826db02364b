"""Mean and variance of values that come in parts, as BatchNormalization computes them.

Parts are pooled by their mean and their variance around it,

    mean     = mean_1 + d n_2 / n
    variance = (variance_1 n_1 + variance_2 n_2) / n + d^2 n_1 n_2 / n^2

with n = n_1 + n_2 and d = mean_2 - mean_1. (Chan, Golub and LeVeque, "Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances", 1979.) The difference of the mean square and the
squared mean would cancel where means are large: of a mean of 1e3 and a variance of one, float32
keeps one digit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Moments(NamedTuple):
    """What is known of the values that have come so far.

    Attributes:
        parts: float64 scalar tensor, the number of parts.
        count: float64 tensor, the number of values per channel: a scalar, or a vector.
        mean: vector.
        variance: vector, the mean square of what differs from the mean.
    """

    parts: Any
    count: Any
    mean: Any
    variance: Any

    @classmethod
    def of(cls, count: Any, mean: Any, variance: Any, epsilon: float) -> Moments:
        """Return those of one part.

        Args:
            count: number of values, float64 scalar or vector.
            mean, variance: of one part, as `averages` returns them.
            epsilon: what Keras adds to the number it divides by: 0, or with masks more.
        """
        # Without values there is no mean; but where all are masked Keras takes zero for it.
        is_part = tf.constant(True) if epsilon else tf.reduce_any(count > 0)
        growth = tf.cast(tf.math.divide_no_nan(count + epsilon, count), mean.dtype)
        exact = mean * growth
        variance = variance * growth - tf.square(exact - mean) if epsilon else variance
        return cls(tf.ones((), tf.float64), count, exact, variance).counted_if(is_part)

    def counted_if(self, condition: Any) -> Moments:
        """Return these, or those of nothing where `condition`, a bool scalar, does not hold."""
        return Moments(*(tf.where(condition, value, tf.zeros_like(value)) for value in self))

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both."""
        count = self.count + other.count
        share, rest = (
            tf.cast(tf.math.divide_no_nan(n, count), self.mean.dtype)
            for n in (other.count, self.count)
        )
        step = other.mean - self.mean
        return Moments(
            self.parts + other.parts,
            count,
            self.mean + step * share,
            self.variance * rest + other.variance * share + (step * share) * (step * rest),
        )

    def averages(self, epsilon: float) -> tuple[Any, Any]:
        """Return mean and variance of all values as Keras would compute them at once."""
        if not epsilon:
            return self.mean, self.variance
        share = tf.cast(self.count / (self.count + epsilon), self.mean.dtype)
        mean = self.mean * share
        return mean, (self.variance + tf.square(self.mean - mean)) * share
