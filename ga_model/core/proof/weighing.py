"""The possible weights of a microbatch in its window."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose
from typing import NamedTuple

from ga_model.base import _numbers
from ga_model.base._types import Scalar


class Seen(NamedTuple):
    """What a microbatch shows about its weight.

    Attributes:
        rows: number of samples; a tensor in a graph for any number.
        scalars: scalars that its step divides by, bounds or branches on, by name.
        loss_weight: denominator of the compiled losses; None for a sum, or if it is unknown.
    """

    rows: Scalar
    scalars: dict[str, Scalar]
    loss_weight: Scalar = None


class Watched(NamedTuple):
    """A scalar of a step that was constant in a trial, or proportional to the weight.

    Attributes:
        name: name of the scalar.
        value: its value, or its quotient by the weight of the microbatch.
        is_per_weight: whether it is the quotient.
    """

    name: str
    value: float
    is_per_weight: bool


class Weighing(NamedTuple):
    """A way to weigh microbatches. The weight of a window is the sum of theirs.

    Attributes:
        source: "loss" (the denominator of the compiled losses), "samples" (their number), "sum"
            (each counts once, and the window is not divided), or the name of a divisor.
        epsilon: constant in the weight that a window counts once, as in `sum(mask) + epsilon`.
        times_samples: whether the source is multiplied by the number of samples, as a mask's mean.
        least: bound of the weight of a microbatch, and of that of a window, as in
            `maximum(sum(mask), least)`. The source is the number that it bounds.
    """

    source: str
    epsilon: float = 0.0
    times_samples: bool = False
    least: float = 0.0

    @property
    def is_sum(self) -> bool:
        return self.source == "sum"

    @property
    def is_divisor(self) -> bool:
        """Whether the weight is a scalar that the step divides by."""
        return self.source not in ("loss", "samples", "sum", "last")

    def is_in(self, others: Iterable[Weighing]) -> bool:
        """Return whether this is among several weighings, up to rounding of `epsilon`."""
        return any(
            self._replace(epsilon=0.0) == other._replace(epsilon=0.0)
            and isclose(self.epsilon, other.epsilon, rel_tol=1e-3, abs_tol=1e-9)
            for other in others
        )

    def weight(self, seen: Seen) -> Scalar:
        """Return the weight of a microbatch, with which its gradient is multiplied."""
        return _numbers.at_least(self._unbounded(seen), self.least)

    def count(self, seen: Seen) -> Scalar:
        """Return what a microbatch adds to the weight of its window, before that is bounded.

        If there are samples, it counts at its bound, too.
        """
        count = self._unbounded(seen)
        return _numbers.at_least_minimum(count, seen.rows) if self.least else count

    def is_rare(self, seen: Seen) -> Scalar:
        """Return whether the weight of a microbatch is zero, or bounded: a bool scalar."""
        weight = self._unbounded(seen)
        return weight < self.least if self.least else weight == 0

    def _unbounded(self, seen: Seen) -> Scalar:
        if self.source in ("samples", "sum"):
            return 1.0 * seen.rows if self.source == "samples" else 1.0
        weight = seen.loss_weight if self.source == "loss" else seen.scalars[self.source]
        if self.times_samples:
            weight = weight * seen.rows
        return weight
