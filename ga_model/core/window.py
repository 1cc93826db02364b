"""The open window of a model: its number of batches, and the sums of its microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import keras
from keras import ops

from ga_model.base import _numbers
from ga_model.base._types import Gradient, Nest, Scalar, Tensor
from ga_model.core.backend_types import Applied
from ga_model.core.batch import num_rows, samples_between
from ga_model.core.noise import Squares
from ga_model.core.statistics import Moments

if TYPE_CHECKING:
    from ga_model.core.findings import Known


class Amount(NamedTuple):
    """The weighted sum of a logged number over microbatches: scalars.

    Attributes:
        numerator, denominator: sums whose quotient is the mean, or sum, of the number.
        count: sum of the counts for the metric.
        num_added: number of microbatches that counted.
    """

    numerator: Scalar
    denominator: Scalar
    count: Scalar
    num_added: Scalar

    def plus(self, other: Amount) -> Amount:
        """Return the sum of both."""
        return Amount._make(a + b for a, b in zip(self, other))

    def at_least(self, least: float) -> Amount:
        """Return the amount with a bounded denominator."""
        return self._replace(denominator=_numbers.at_least(self.denominator, least))

    def value(self) -> Scalar:
        """Return the mean or sum, or zero if nothing was added."""
        return _numbers.divide_or_zero(self.numerator, self.denominator)


class Rows(NamedTuple):
    """A sparse gradient: rows of a table that were looked up. Only TensorFlow has these.

    Keras's optimizers treat each row separately, including several rows of one index. So a window
    keeps the rows of all microbatches, and sums none.

    Attributes:
        values: values of the rows, in `unit`.
        indices: indices of the rows in the table.
        unit: see `Sums`; zero if the microbatch does not count, so that values may be NaN; None for
            the mean of a window.
    """

    values: Tensor
    indices: Tensor
    unit: Scalar | None


class Positions(Rows):
    """Rows whose number does not depend on the number of samples, such as those of positions.

    If all microbatches of a window have the same indices, the full batch has each row once.
    """


class Largest(NamedTuple):
    """A value that overwrites a variable, such as the scale of a float8 layer.

    Keras passes it as the gradient of the variable. The largest value of a window is that of all
    its samples. It has no weight.

    Attributes:
        values: the tensor.
    """

    values: Tensor

    def plus(self, other: Largest, _: Scalar = None, counts: Scalar = True) -> Largest:
        """Return the larger value. That of a microbatch of weight 0 counts only if it is finite."""
        larger, is_finite = ops.maximum(self.values, other.values), ops.isfinite(other.values)
        finite = ops.where(is_finite, larger, self.values)
        return Largest(_numbers.where(counts, larger, finite))


class Sums(NamedTuple):
    """The sums of one microbatch, or of a window.

    Attributes:
        gradients: one per trainable variable, in float32 or its wider dtype, weighted in `unit`;
            None if there is none. A sparse gradient of a window is a tuple of the `Rows` of its
            microbatches.
        total: sum of the weights in `unit`, or None if the loss is a sum.
        unit: the largest weight so far times a power of two near the number of microbatches; zero
            before the first.
        num_counted, num_skipped: int32 scalars, microbatches that count, and that were skipped.
        has_zero_division: bool scalar, whether the denominator of a term was zero in a microbatch.
        num_news: microbatches that showed what no trial of the step has.
        moments: moments of the calls of BatchNormalization layers, in order.
        amounts: amounts of the numbers for metrics and logs, in order.
        squares: contributions to the gradient noise per optimizer, if it is measured.
        entries: number of loss values of each unmasked mean, if there are several; for a window,
            those of its first microbatch.
        is_uneven: bool scalar, whether their proportions differ in another microbatch.
    """

    gradients: list[Gradient]
    total: Scalar
    unit: Scalar
    num_counted: Scalar
    num_skipped: Scalar
    has_zero_division: Scalar
    num_news: Scalar
    moments: list[Moments]
    amounts: list[Amount]
    squares: tuple[Squares, ...] = ()
    entries: tuple[Scalar, ...] = ()
    is_uneven: Scalar = False

    @classmethod
    def of_nothing(cls, num_gradients: int, is_sum: bool = False) -> Sums:
        """Return the sums of `num_gradients` variables before the first microbatch."""
        total = None if is_sum else 0.0
        return cls([None] * num_gradients, total, 0.0, 0, 0, False, 0, [], [])

    def plus(self, other: Sums) -> Sums:
        """Return the sum of both. `other` comes later, and its unit is at least as large."""
        shrink = shrinkage(self.unit, other.unit)
        if self.total is None:
            gradients = [_sum(a, b, 1.0) for a, b in zip(self.gradients, other.gradients)]
            total = None
        else:
            counts = other.total != 0  # not multiplied by 0: gradients may be NaN
            gradients = [
                _sum(a, b, shrink, counts) for a, b in zip(self.gradients, other.gradients)
            ]
            total = self.total * shrink + other.total
        return Sums(
            gradients,
            total,
            other.unit,
            self.num_counted + other.num_counted,
            self.num_skipped + other.num_skipped,
            self.has_zero_division | other.has_zero_division,
            self.num_news + other.num_news,
            [a.plus(b) for a, b in zip(self.moments, other.moments)],
            [a.plus(b) for a, b in zip(self.amounts, other.amounts)],
            tuple(a.plus(b, shrink) for a, b in zip(self.squares, other.squares)),
            *self._compared(other),
        )

    def _compared(self, other: Sums) -> tuple[tuple[Scalar, ...], Scalar]:
        """Return the entries of the first microbatch, and whether those of another differ."""
        if not self.entries or not other.entries:
            return self.entries or other.entries, self.is_uneven
        before, after, is_uneven = self.entries, other.entries, self.is_uneven
        for count, other_count in zip(before[1:], after[1:]):
            # Entries of a window without microbatches are zero, and never differ.
            is_uneven = is_uneven | (count * after[0] != other_count * before[0])
        is_empty = self.num_counted == 0
        return tuple(_numbers.where(is_empty, b, a) for a, b in zip(before, after)), is_uneven

    def counted(self) -> Sums:
        """Return the sums of one microbatch as those of a window."""
        gradients = self.gradients
        if self.total is not None:
            counts = self.total != 0  # gradients of weight 0 may be NaN
            gradients = [
                with_values(g, lambda v: _numbers.where(counts, v, ops.zeros_like(v)))
                for g in gradients
            ]
        gradients = [(g,) if isinstance(g, Rows) else g for g in gradients]
        return self._replace(gradients=gradients)

    def at_least(self, least: float) -> Sums:
        """Return the sums with a bounded total."""
        if not least or self.total is None:
            return self
        in_unit = _numbers.divide_or_zero(least, self.unit)
        return self._replace(total=_numbers.where(self.total < in_unit, in_unit, self.total))

    def mean(self, variables: list[keras.Variable]) -> list[Gradient]:
        """Return the gradients of the update, in the dtypes of the variables, consuming the sums.

        They are zero in a window of weight 0, as in plain Keras.
        """
        total = self.total
        divisor = None if total is None else _numbers.where(total == 0, 1.0, total)

        def mean(gradient: Gradient, dtype: str) -> Gradient:
            is_mean = divisor is None or (isinstance(gradient, Rows) and gradient.unit is None)
            return with_values(
                gradient, lambda v: ops.cast(v if is_mean else _numbers.divided(v, divisor), dtype)
            )

        return [mean(g, v.dtype) for g, v in zip(self.gradients, variables)]

    def without_rows(self) -> Sums:
        """Return the sums without sparse rows, which are not summed."""
        is_sparse = [isinstance(g, Rows) or is_list(g) for g in self.gradients]
        pairs = zip(self.gradients, is_sparse)
        return self._replace(gradients=[() if sparse else g for g, sparse in pairs])


def shrinkage(unit: Scalar, later: Scalar) -> Scalar:
    """Return the factor that converts sums from one unit to a later one, at least as large."""
    return _numbers.where(unit == 0, 1.0, _numbers.divide_or_zero(unit, later))


def _sum(a: Gradient, b: Gradient, *args: Scalar) -> Gradient:
    """Add the gradient `b` of a microbatch to the sum `a` of a window by `_numbers.added`."""
    if isinstance(b, Rows):
        if a is None or is_list(a):
            return (*(a or ()), b)
        b = _numbers.dense(b.values, b.indices, a.shape)
    if isinstance(a, tuple) and not a:  # its rows are kept elsewhere
        return b
    if a is None or b is None:
        return b if a is None else shrunk(a, args[0])
    if isinstance(b, Largest):
        return a.plus(b, *args)
    return _numbers.added(a, b, *args)


def shrunk(total: Gradient, shrink: Scalar) -> Gradient:
    """Return a sum, or None, in a later unit. Rows keep their own unit."""
    if is_list(total):
        return total
    return with_values(total, lambda values: values * _numbers.like(values, shrink))


def is_list(gradient: Gradient) -> bool:
    """Return whether a gradient is a tuple of sparse ones, whose rows are not summed."""
    return type(gradient) is tuple


def values_of(gradient: Gradient) -> Tensor:
    """Return the values of a dense or sparse gradient."""
    return gradient.values if isinstance(gradient, (Rows, Largest)) else gradient


def with_values(gradient: Gradient, function: Callable[[Tensor], Tensor]) -> Gradient:
    """Return a gradient, dense or sparse, with a function applied to its values, or None.

    A value that overwrites a variable is unchanged.
    """
    if isinstance(gradient, Largest):
        return gradient
    if isinstance(gradient, Rows):
        return gradient._replace(values=function(gradient.values))
    return None if gradient is None else function(gradient)


class Window:
    """Counts batches, and holds their sums.

    Args:
        steps: batches per window.

    Attributes:
        steps: batches of the open window, or of the next one.
        num_batches: batches that wait for the update.
        sums: sums of the microbatches, or None before the first.
        known: what is known of the step after a trial, and the last microbatch, or None.
        trial_samples: samples of each microbatch for a trial, and `num_news` of the sums after it.
        unseen: its first batches, if their weights are assumed, because no trial has shown any
            gradient so far. They are repeated with the weights that a trial finds.
        state: values of the state of layers and metrics before these.
        was_full: whether any window was full so far.
    """

    def __init__(self, steps: int) -> None:
        self._next_steps = self.steps = steps
        self.was_full = False
        self.discard()

    def set_steps(self, accumulation_steps: int) -> None:
        """Set the number of batches of the next window."""
        self._next_steps = accumulation_steps
        if not self.is_open():
            self.steps = accumulation_steps

    def discard(self) -> None:
        """Discard this window, and begin the next one."""
        self.steps = self._next_steps
        self.sums: Sums | None = None
        self.num_batches = 0
        self.applied: list[Applied] | None = None  # optimizers that the last step applied
        self.known: tuple[Known, Nest] | None = None
        self.trial_samples: list[tuple[Nest, Scalar]] = []
        self.unseen: list[Nest] = []
        self.state: list[Tensor] = []

    def keep_samples(self, data: Nest, num_news: Scalar) -> None:
        """Hold the first samples of a microbatch, or all if there are few."""
        rows = num_rows(data)
        self.trial_samples.append((samples_between(data, 0, rows if rows <= 8 else 5), num_news))

    def samples_with_news(self) -> list[Nest]:
        """Return samples of a microbatch with news, then of the others, or [] if none has news."""
        counts = [int(num_news) for _, num_news in self.trial_samples]
        if not counts or not counts[-1]:
            return []
        is_news = [now > before for before, now in zip([0, *counts], counts)]
        first_index = is_news.index(True)
        others = [index for index in range(len(counts)) if index != first_index]
        others.sort(key=lambda index: is_news[index])
        return [self.trial_samples[index][0] for index in (first_index, *others)]

    def is_all_unseen(self) -> bool:
        """Return whether the weights of all its batches are assumed, if it has any."""
        return len(self.unseen) == self.num_batches

    def applies(self, applied: list[Applied]) -> bool:
        """Record what a microbatch applies, and return whether earlier ones applied the same."""
        before, self.applied = self.applied, applied
        if before is None or before is applied:
            return True
        return [*map(_ids_of, before)] == [*map(_ids_of, applied)]

    def end_batch(self) -> bool:
        """Count a batch, and return whether it fills the window."""
        self.num_batches += 1
        is_full = self.num_batches >= self.steps
        self.was_full = self.was_full or is_full
        return is_full

    def is_open(self) -> bool:
        """Return whether batches wait for the update."""
        return self.num_batches > 0


def _ids_of(applied: Applied) -> tuple[int, ...]:
    return id(applied.optimizer), *map(id, applied.variables)
