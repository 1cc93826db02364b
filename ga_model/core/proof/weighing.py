"""What a microbatch may weigh in its window."""

from __future__ import annotations

from collections.abc import Iterable
from math import isclose
from typing import Any, NamedTuple


class Seen(NamedTuple):
    """What one microbatch shows of its weight.

    Attributes:
        rows: its samples, or a scalar where a graph is for any number.
        scalars: scalars that its step divides by, bounds or decides by, by name.
        of_loss: scalar, what the compiled losses say, or None: it is a sum, or they say nothing.
    """

    rows: Any
    scalars: dict[str, Any]
    of_loss: Any = None


class Watched(NamedTuple):
    """A scalar of a step that was the same in all that was tried, or a number of weights.

    Attributes:
        name: of the scalar.
        value: it, or what it is per weight of the microbatch.
        is_per_weight: which of both.
    """

    name: str
    value: float
    is_per_weight: bool


class Weighing(NamedTuple):
    """A way to weigh microbatches. Those of a window have as much weight together as its sum.

    Attributes:
        source: "loss" (what the compiled losses say), "samples", "sum" (each counts once, and the
            window is not divided), or the name of a divisor.
        epsilon: a part of the weight that a window has once, and not once per microbatch: that in
            `sum(mask) + epsilon`.
        is_by_sample: whether it is to be multiplied by the samples, such as the mean of a mask.
    """

    source: str
    epsilon: float = 0.0
    is_by_sample: bool = False

    @property
    def is_sum(self) -> bool:
        return self.source == "sum"

    @property
    def is_divisor(self) -> bool:
        """Whether the weight is a number that the step divides by."""
        return self.source not in ("loss", "samples", "sum", "last")

    def is_in(self, others: Iterable[Weighing]) -> bool:
        """Return whether this is one of several ways, up to rounding."""
        return any(
            (self.source, self.is_by_sample) == (other.source, other.is_by_sample)
            and isclose(self.epsilon, other.epsilon, rel_tol=1e-3, abs_tol=1e-9)
            for other in others
        )

    def weight(self, seen: Seen) -> Any:
        """Return the weight of a microbatch: a number or a scalar."""
        if self.source in ("samples", "sum"):
            return 1.0 * seen.rows if self.source == "samples" else 1.0
        weight = seen.of_loss if self.source == "loss" else seen.scalars[self.source]
        if self.is_by_sample:
            weight = weight * seen.rows
        return weight
