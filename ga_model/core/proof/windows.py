"""Run one window both ways: all samples at once, and in parts, from the same state.

A *surrogate update* replaces the optimizer: it moves each weight by a rate times its gradient. A
rate of 0 only records. A larger one shows the order of operations in a step at any learning rate,
and leaves no optimizer slots to restore. It moves weights by 3 % of their norm, so that the effect
of the update is far above rounding.

Several starts and cuts are tried, as a single one may hide a difference by chance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from ga_model.base._types import Gradient
from ga_model.core.proof.weighing import Seen, Weighing

if TYPE_CHECKING:
    from ga_model.core.proof.runner import StepRunner

MOVES_BY = 0.03  # the surrogate update moves weights by this fraction of their norm
LARGE = 5_000_000  # models with more values are tried in two windows, on few samples
_HUGE = 50_000_000  # and with more than this in one
_MANY = 65_536  # most entries of an array that are compared, and kept
_NOISE = (0.0, 0.3, 2.0, 8.0)  # of the starts, relative to the root mean square of a weight
_INFINITE = 1e30  # counts as overflow; its inverse, as a rate, is still a normal float32 number
_SCALES = (1.0, 2.0**-10, 2.0**-30)  # factors of the loss scale, in turn while gradients overflow

# Ways to cut the samples of a window: the numbers of samples of the parts.
Cuts = tuple[tuple[int, ...], ...]
About = dict[int | str, tuple[str, bool]]  # see `Outcome`
# Returns the new value of the variable at an index, or None to leave it.
Change = Callable[[int, np.ndarray], np.ndarray | None]


class Outcome(NamedTuple):
    """The results of a step on some samples.

    Attributes:
        gradients: gradients (or None) of the variables that the step updates, in its order.
        places: indices of these variables among all.
        rates: rate of the surrogate update of each of them.
        counters: indices of the `iterations` variables that it increments.
        values: entries of all variables after the step, or [] if they are not compared.
        numbers: numbers that metrics get, which wait for the full batch, by place; and logged
            scalars that are not results of metrics, by name.
        about: the name of each of these, and whether it is exact if a weight is folded into the
            loss, because its denominator is known.
        seen: what the step shows about the weight.
        compiled: values of the user's own compiled losses that return a scalar, by name.
        added: values of losses that layers add, by place.
        at_updates: values of the optimizers' scalars when these are applied, by index.
        terms: weights of the terms of the loss.
        norms: norms of the gradients, 0 where there is none.
    """

    gradients: list[Gradient]
    places: list[int]
    rates: list[float]
    counters: list[int]
    numbers: dict[int | str, np.ndarray]
    about: About
    seen: Seen
    compiled: dict[str, np.ndarray]
    added: dict[int, np.ndarray]
    at_updates: dict[int, np.ndarray]
    terms: list[np.ndarray]
    values: Sequence[np.ndarray] = ()
    norms: tuple[float, ...] = ()

    def weight(self, weighing: Weighing) -> float:
        """Return the weight of the samples."""
        return float(np.asarray(weighing.weight(self.seen)))

    def compared(self, is_folded: bool) -> list[int | str]:
        """Return the keys of the numbers that are not exact by themselves."""
        return [key for key in self.numbers if not (is_folded and self.about[key][1])]


class Window(NamedTuple):
    """A window that was run both ways.

    Attributes:
        values: values of all variables at the start.
        whole: outcome of all samples at once.
        parts: outcomes of the parts, each of which starts where the one before ended.
        rounded: returns the outcome of all samples from weights with a rounding error. It costs as
            much as `whole`, so it is called only if `parts` differ by more than a few roundings.
    """

    values: list[np.ndarray]
    whole: Outcome
    parts: list[Outcome]
    rounded: Callable[[], Outcome]

    def shares(self, weighing: Weighing) -> list[float]:
        """Return the share of each part in the weight of the window; NaN if that is zero."""
        if weighing.is_sum:
            return [1.0] * len(self.parts)
        if weighing.source == "last":
            return [0.0] * (len(self.parts) - 1) + [1.0]
        weights = [part.weight(weighing) for part in self.parts]
        counts = [float(np.asarray(weighing.count(part.seen))) for part in self.parts]
        total = sum(counts) - (len(counts) - 1) * weighing.epsilon
        total = max(total, weighing.least) if weighing.least else total
        return [weight / total if total else float("nan") for weight in weights]


def num_values(variables: Iterable[keras.Variable]) -> int:
    """Return the number of values of all variables."""
    return sum(math.prod(variable.shape) for variable in variables)


def windows(runner: StepRunner, cuts: Cuts) -> Iterator[Window]:
    """Yield windows of a step, each run both ways, and cut in one of the ways in turn.

    The first starts from the actual weights.
    """
    size = num_values(runner.variables)
    starts = 1 if size > _HUGE else 2 if size > LARGE else len(_NOISE)
    chosen: _Entries | None = None
    for number, noise in enumerate(_NOISE[:starts]):
        sizes = cuts[number % len(cuts)]
        for scale in _SCALES if runner.scales else _SCALES[:1]:
            start = functools.partial(_start, runner, noise, number, scale)
            runner.begin(start())
            whole = runner.run(0, sum(sizes))
            if not _overflows([whole]):
                break
        else:
            continue
        chosen = chosen or _Entries(runner, whole)
        whole = chosen.of(whole)
        numbers = [whole.numbers[key] for key in whole.compared(runner.is_folded)]
        if number and not all(np.isfinite(value).all() for value in numbers):
            continue  # they show nothing
        if window := _in_parts(runner, start, sizes, chosen, whole):
            yield window


def _in_parts(
    runner: StepRunner,
    start: Callable[[], Change],
    sizes: tuple[int, ...],
    chosen: _Entries,
    whole: Outcome,
) -> Window | None:
    """Run a window in parts of these sizes, and return it, or None if gradients overflow.

    Args:
        start: returns the change of values that the window starts from.
        chosen: the entries to compare.
        whole: outcome of all samples at once.
    """
    parts, begin, total = [], 0, sum(sizes)
    runner.begin(start())
    values = chosen.values()
    for size in sizes:
        part, begin = runner.run(begin, begin + size, whole), begin + size
        # Only the values after the last part are compared.
        parts.append(chosen.of(part, has_values=begin == total))
    if (runner.rounding > runner.epsilon or runner.scales) and _overflows(parts):
        return None

    @functools.cache
    def outcome_of_rounded() -> Outcome:
        generator = np.random.default_rng(1)

        def change(place: int, value: np.ndarray) -> np.ndarray | None:
            is_trained = place in runner.trained
            return rounded(value, runner.rounding, generator) if is_trained else None

        runner.begin(start(), change)
        return chosen.of(runner.run(0, total))

    return Window(values, whole, parts, outcome_of_rounded)


class _Entries:
    """Chooses the entries of large arrays to compare: of large gradients, and at random."""

    def __init__(self, runner: StepRunner, outcome: Outcome) -> None:
        self._runner = runner
        generator = np.random.default_rng(0)
        by_place = dict(zip(outcome.places, outcome.gradients))
        self._chosen: dict[int, np.ndarray] = {}  # indices in flat arrays, by those of variables
        for place, variable in enumerate(runner.variables):
            if (size := math.prod(variable.shape)) <= _MANY:
                continue
            chosen = generator.integers(0, size, _MANY // 2)  # few are equal
            if (gradient := by_place.get(place)) is not None:
                sizes = np.abs(np.asarray(gradient).ravel())
                rows = sizes[: size // _MANY * _MANY].reshape(_MANY // 2, -1)
                largest = rows.argmax(1) + np.arange(_MANY // 2) * rows.shape[1]  # of each row
                chosen = np.concatenate([chosen, largest])
            self._chosen[place] = np.sort(chosen)  # in order, they are read in half the time

    def values(self) -> list[np.ndarray]:
        """Return the chosen entries of the present values of all variables."""
        return [self._part(place, value) for place, value in enumerate(self._runner.values())]

    def of(self, outcome: Outcome, has_values: bool = True) -> Outcome:
        """Return an outcome with the chosen entries of its arrays, and their norms."""
        pairs = zip(outcome.places, outcome.gradients)
        gradients = [None if g is None else self._part(place, g) for place, g in pairs]
        norms = tuple(0.0 if g is None else norm_of([g]) for g in gradients)
        values = self.values() if has_values else []
        return outcome._replace(gradients=gradients, values=values, norms=norms)

    def _part(self, place: int, array: np.ndarray) -> np.ndarray:
        chosen = self._chosen.get(place)
        return array if chosen is None else np.asarray(array).ravel()[chosen]


def _overflows(outcomes: Sequence[Outcome]) -> bool:
    """Return whether gradients are not all finite, or are nearly infinite by a loss scale."""
    gradients = [g for outcome in outcomes for g in outcome.gradients if g is not None]
    return not all((np.abs(gradient) < _INFINITE).all() for gradient in gradients)


def norm_of(arrays: Sequence[ArrayLike]) -> float:
    """Return the Euclidean norm of all numbers in arrays."""
    # `np.linalg.norm` is avoided: its threads wait for those of PyTorch.
    return float(sum(np.sum(np.square(np.asarray(a), dtype="float64")) for a in arrays) ** 0.5)


def _start(runner: StepRunner, noise: float, seed: int, scale: float) -> Change:
    """Return the change for a start: noise, also on weights of zero, and smaller loss scales."""
    generator = np.random.default_rng(seed)

    def change(place: int, value: np.ndarray) -> np.ndarray | None:
        if place in runner.scales:
            return np.asarray(value * scale, value.dtype)
        if not noise:
            return None
        if place in runner.trained and value.dtype.kind != "i":
            size = noise * max(norm_of([value]) / max(value.size, 1) ** 0.5, 0.1)
            moved = value + size * generator.standard_normal(value.shape, "float32")
        elif place not in runner.perturbed or value.size != 1:
            return None
        elif value.dtype.kind in "iu":  # a counter, which may control a schedule
            limit = int(np.iinfo(value.dtype).max)
            moved = np.minimum(value.astype("int64") + int(10 ** min(2 * noise, 5)), limit)
        else:  # perhaps an annealed factor
            moved = value + noise * generator.random()
        return np.asarray(moved).astype(value.dtype)

    return change


def rounded(value: np.ndarray, rounding: float, generator: np.random.Generator) -> np.ndarray:
    """Return an array with a relative rounding error of random sign in each entry."""
    signs = generator.choice([-1.0, 1.0], value.shape)
    moved: np.ndarray = (value.astype("float64") * (1 + rounding * signs)).astype(value.dtype)
    return moved
