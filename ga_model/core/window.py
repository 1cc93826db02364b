"""The open window of a model: its count, and what its microbatches have come to."""

from __future__ import annotations

from typing import Any, NamedTuple

from keras import ops

from ga_model.base import _numbers
from ga_model.core.noise import Squares
from ga_model.core.statistics import Moments


class Amount(NamedTuple):
    """What a logged number has come to over microbatches, scalars.

    Attributes:
        numerator, denominator: of their mean, or sum.
        count: what a metric counts it as, summed.
        num_added: microbatches that have counted.
    """

    numerator: Any
    denominator: Any
    count: Any
    num_added: Any

    def plus(self, other: Amount) -> Amount:
        """Return both."""
        return Amount._make(a + b for a, b in zip(self, other))

    def value(self) -> Any:
        """Return the mean or sum, or zero of nothing."""
        return _numbers.share(self.numerator, self.denominator)


class Sums(NamedTuple):
    """What microbatches have come to: one of them, or those of a window.

    Attributes:
        gradients: one for each trainable variable, float32 or its wider dtype, each times the
            weight of its microbatch in `unit`; None where it has none.
        total: scalar, the sum of these weights, or None where the loss is a sum.
        unit: scalar, what weights are counted in: the heaviest so far times a power of two near
            the number of microbatches; zero before the first.
        num_counted, num_skipped: int32 scalars, microbatches that count, and others.
        has_lost: bool scalar, whether one had a term that was made zero because it was divided by
            zero.
        moments: of the calls of BatchNormalization layers, in their order.
        amounts: of the numbers that metrics get, in their order.
        squares: what they tell of the noise of gradients, or None if it is not measured.
    """

    gradients: list[Any]
    total: Any
    unit: Any
    num_counted: Any
    num_skipped: Any
    has_lost: Any
    moments: list[Moments]
    amounts: list[Amount]
    squares: Squares | None = None

    def plus(self, other: Sums) -> Sums:
        """Return what both come to. The unit of `other`, which came later, is not the smaller."""
        shrink = _numbers.where(self.unit == 0, 1.0, _numbers.share(self.unit, other.unit))
        if self.total is None:
            gradients = [_sum(a, b, 1.0) for a, b in zip(self.gradients, other.gradients)]
            total = None
        else:
            counts = other.total != 0  # else it is left out, and not multiplied: it may be NaN
            gradients = [
                a if b is None else _numbers.where(counts, _sum(a, b, shrink), a)
                for a, b in zip(self.gradients, other.gradients)
            ]
            total = self.total * shrink + other.total
        return Sums(
            gradients,
            total,
            other.unit,
            self.num_counted + other.num_counted,
            self.num_skipped + other.num_skipped,
            ops.logical_or(self.has_lost, other.has_lost),
            [a.plus(b) for a, b in zip(self.moments, other.moments)],
            [a.plus(b) for a, b in zip(self.amounts, other.amounts)],
            self.squares and other.squares and self.squares.plus(other.squares, shrink),
        )

    def mean(self, variables: list[Any]) -> list[Any]:
        """Return the gradients of the update, in the dtypes of the variables.

        Those of a window without any weight are zero, as plain Keras's are.
        """
        divisor: Any = 1.0
        if self.total is not None:
            divisor = _numbers.where(self.total == 0, 1.0, self.total)
        return [
            None if g is None else ops.cast(g / _numbers.like(g, divisor), v.dtype)
            for g, v in zip(self.gradients, variables)
        ]


def _sum(a: Any, b: Any, shrink: Any) -> Any:
    return a if b is None else a * _numbers.like(a, shrink) + b


class Window:
    """Counts batches, and has what they have come to.

    Args:
        steps: batches that fill it.

    Attributes:
        steps: batches that fill the open window, or the next one.
        sums: what its microbatches have come to, or None before the first.
        entries: loss values of a sample, of each term that averages over them.
    """

    def __init__(self, steps: int) -> None:
        self._next_steps = self.steps = steps
        self.discard()

    def set_steps(self, accumulation_steps: int) -> None:
        """Let the next window have `accumulation_steps` batches."""
        self._next_steps = accumulation_steps
        if not self.is_open():
            self.steps = accumulation_steps

    def discard(self) -> None:
        """Begin the next one, and forget what there is."""
        self.steps = self._next_steps
        self.sums: Sums | None = None
        self._num_batches = 0
        self.entries: tuple[float, ...] | None = None

    def end_batch(self) -> bool:
        """Count a batch, and return whether it fills the window."""
        self._num_batches += 1
        return self._num_batches >= self.steps

    def is_open(self) -> bool:
        """Return whether there are batches that no update has used yet."""
        return self._num_batches > 0

    def num_batches(self) -> int:
        """Return how many batches there are that no update has used yet."""
        return self._num_batches

    def messages(self, model: str) -> list[str]:
        """Return the warnings about the windows so far: none."""
        return []
