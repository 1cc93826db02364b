"""The results of the microbatches of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.recording._recorder import Target
from ga_model.replicas import _strategy
from ga_model.sums._moments import Moments
from ga_model.sums._sums import GradientSum


class Part(NamedTuple):
    """What one microbatch gave, or several together.

    Attributes:
        sums: one per optimizer.
        logged: sums over the microbatches, as `BatchLogs.sums`.
        last: the last microbatch's, as `BatchLogs.last`; or the logs, where none wait.
        num_counted: int64 scalar tensor, microbatches that were not left out.
        row_counts: as those of `StepLosses`, summed over the microbatches.
        lost: as those of `StepLosses`, for any of the microbatches.
        moments: what BatchNormalization layers have computed, one per call.
        before: values of variables that the microbatch has updated itself, as they were before, in
            the order of `Passes.updated`.
    """

    sums: list[GradientSum]
    logged: list[Any]
    last: Any
    num_counted: Any
    row_counts: list[Any]
    lost: list[Any]
    moments: list[Moments]
    before: list[Any]

    def plus(self, other: Part, targets: list[Target]) -> Part:
        return Part(
            [a.plus(b, t.variables) for a, b, t in zip(self.sums, other.sums, targets)],
            [a + b for a, b in zip(self.logged, other.logged)],
            other.last,
            self.num_counted + other.num_counted,
            [a + b for a, b in zip(self.row_counts, other.row_counts)],
            [a | b for a, b in zip(self.lost, other.lost)],
            [a.plus(b) for a, b in zip(self.moments, other.moments)],
            other.before,
        )

    def if_finite(self, units: list[Any]) -> Part:
        """Return the part, or one that counts for nothing if a gradient in it is not finite.

        What has updated variables counts for nothing on all replicas, or on none.

        Args:
            units: of each of the `sums`, before this microbatch.
        """
        is_finite = tf.reduce_all([gradients.is_finite() for gradients in self.sums])
        if self.before:
            (number,) = _strategy.sum_over_replicas([tf.cast(~is_finite, tf.float64)])
            is_finite = tf.equal(number, 0.0)
        return self._replace(
            sums=[s.counted_if(is_finite, unit) for s, unit in zip(self.sums, units)],
            logged=[tf.where(is_finite, value, 0.0) for value in self.logged],
            num_counted=tf.cast(is_finite, tf.int64),
            row_counts=[tf.where(is_finite, counts, 0) for counts in self.row_counts],
            lost=[is_finite & lost for lost in self.lost],
            moments=[moments.counted_if(is_finite) for moments in self.moments],
        )
