"""What the terms of a loss are divided by, and what prevents adding up microbatches."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.base import _numbers
from ga_model.reading._operations import MEAN, SUM

# Why gradients of microbatches do not add up to that of the full batch.
SEVERAL = "combines several samples"
NOT_LINEAR = "is not linear in a sum or mean over samples"
OF_GRADIENT = (
    "computes with values that are divided by the number of samples, as a gradient with respect to "
    "samples is"
)
DRAWN = "draws with a fixed seed"
HIDDEN = "divides by something inside of a nested function"
UNKNOWN = "may combine several samples"


class Obstacle(NamedTuple):
    """An operation that keeps a loss from being put together from microbatches.

    Attributes:
        op: the operation.
        why: one of the sentences of this module.
    """

    op: Any
    why: str


class Denominator(NamedTuple):
    """What a term of a loss is divided by.

    Attributes:
        kind: denominators of equal kind are proportional to one another, in all microbatches.
        count: scalar tensor, what the term counts, or None: it is a sum.
        divisor: scalar tensor, what it was divided by, where that is more than the count.
        once: scalar tensor, what the full batch adds to the count once.
        least: what the count of the full batch counts as at least.
        others: counts of other terms of this kind, which may be those of another part of the batch.
        is_safe: whether a term is zero where it is divided by zero, and not NaN.
        lost: bool scalar tensors, each whether that made a term zero which had a value.
    """

    kind: Hashable
    count: Any = None
    divisor: Any = None
    once: Any = None
    least: float = 0.0
    others: tuple[Any, ...] = ()
    is_safe: bool = False
    lost: tuple[Any, ...] = ()

    @property
    def of_loss(self) -> str:
        """What a term with this denominator is to the samples: a mean or a sum."""
        return SUM if self.count is None else MEAN

    def counts(self) -> list[Any]:
        """Return the counts of all terms of this kind."""
        return [count for count in (self.count, *self.others) if count is not None]

    def weight_and_factor(self, is_first: Any, rows: Any = None) -> tuple[Any, Any]:
        """Return the weight that a mean asks for, and the factor of it that is left, or None.

        Args:
            is_first: bool scalar tensor, whether the window has no microbatch yet.
            rows: samples of the microbatch, where one without weight counts as a very small one.
        """
        count = tf.cast(self.count, tf.float64)
        if rows is not None:
            count = _numbers.not_zero(count, rows)
        if self.divisor is None:
            return count, None
        if self.once is not None:
            once = tf.cast(self.once, tf.float64)
            count += tf.where(is_first, once, tf.zeros_like(once))
        # What is divided may be more than what is counted, and be there where that is zero.
        count = _numbers.not_zero(count, 1)
        return count, tf.cast(self.divisor, tf.float64) / count

    def words(self) -> str:
        """Return what it is, for a message."""
        name = self.kind[0] if isinstance(self.kind, tuple) else self.kind
        words = {
            "rows": "the number of samples",
            "chosen": "the number of entries that a mask selects",
            "entries": "the number of entries of the samples",
            "sum of weights": "a sum of weights",
            "mean of weights": "a mean of weights",
            "sum": "nothing (a sum)",
        }
        text = words.get(str(name), "the denominator of a compiled loss")
        is_computed = name in ("sum of weights", "mean of weights")
        return f"{text} ({self.count.op.name!r})" if is_computed else text


OF_SUM = Denominator("sum")
OF_WEIGHTS = Denominator("weights alone")


def by_kind(denominators: Iterable[Denominator]) -> dict[Hashable, Denominator]:
    """Return the first denominator of each kind, with the counts of the others."""
    found: dict[Hashable, Denominator] = {}
    for denominator in denominators:
        first = found.setdefault(denominator.kind, denominator)
        counts = {id(c): c for d in (first, denominator) for c in d.counts()}
        others = tuple(counts.values())[first.count is not None :]
        lost = {id(flag): flag for d in (first, denominator) for flag in d.lost}
        is_safe = first.is_safe and denominator.is_safe
        found[first.kind] = first._replace(
            others=others, is_safe=is_safe, lost=tuple(lost.values())
        )
    return found


class StepLoss(NamedTuple):
    """What is known of a tensor of which a step takes the gradient.

    Attributes:
        denominators: those of its terms, each once; or None, if it is not known.
        obstacle: what then keeps it from being put together from microbatches, where that is known.
        is_by_sample: whether it has an entry of axis 0 for each sample, of which a tape takes the
            sum.
    """

    denominators: list[Denominator] | None
    obstacle: Obstacle | None = None
    is_by_sample: bool = False
