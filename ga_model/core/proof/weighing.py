"""The possible weights of a microbatch in its window."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose
from typing import NamedTuple

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
    """

    source: str
    epsilon: float = 0.0
    times_samples: bool = False

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
            (self.source, self.times_samples) == (other.source, other.times_samples)
            and isclose(self.epsilon, other.epsilon, rel_tol=1e-3, abs_tol=1e-9)
            for other in others
        )

    def weight(self, seen: Seen) -> Scalar:
        """Return the weight of a microbatch."""
        if self.source in ("samples", "sum"):
            return 1.0 * seen.rows if self.source == "samples" else 1.0
        weight = seen.loss_weight if self.source == "loss" else seen.scalars[self.source]
        if self.times_samples:
            weight = weight * seen.rows
        return weight
