"""Try one window both ways: all samples at once, and in parts, from the same state.

The optimizer is stood in for by a *surrogate update*, which moves each weight against its gradient
by a rate. A rate of 0 is what a recorded step does. With others the order of what a step does shows
at any learning rate, and no slot of an optimizer has to be put back. The rates move weights by 3 %
of their norm, so that an effect of the update is far above rounding.

Several starts and cuts are tried: one alone may hide a difference by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ga_model.core.proof.weighing import Seen, Weighing

if TYPE_CHECKING:
    from ga_model.core.proof.runner import StepRunner

MOVES_BY = 0.03  # of their norm, by which the surrogate update moves weights
_LARGE = 5_000_000  # values, of which fewer windows are tried
_HUGE = 50_000_000  # and of which one is
_MANY = 65_536  # entries of an array, of which more are not compared, and not held
_NOISE = (0.0, 0.3, 2.0, 8.0)  # of the starts, in standard deviations of a weight
_INFINITE = 1e30  # in float32 a rate by its inverse is still a normal number
_SCALES = (1.0, 2.0**-10, 2.0**-20)  # of the loss, one after the other while gradients overflow

# Samples of the parts of a window, in one way or several, of the same samples.
Cuts = tuple[tuple[int, ...], ...]


class Outcome(NamedTuple):
    """What the step makes of some samples.

    Attributes:
        gradients: of the variables that the step updates, in its order, or None.
        places: of these variables among all.
        rates: of the surrogate update of each of them.
        counters: places of the counts of updates that it adds one to.
        values: of all variables, after the step.
        numbers: what metrics got that waits for the full batch, None of those of compiled losses.
        logs: scalars that the step logs and that are no results of metrics.
        seen: what tells the weight.
        compiled: values of compiled losses of the user's own that are numbers, by name.
        added: values of losses that layers add.
        at_updates: values of scalars of optimizers when these are applied, by their places.
        terms: the weights of the terms of the loss.
        unfolded: numbers, logs and what tells the weight, if no weight is folded into the loss.
    """

    gradients: list[Any]
    places: list[int]
    rates: list[float]
    counters: list[int]
    values: list[Any]
    numbers: list[Any]
    logs: dict[str, Any]
    seen: Seen
    compiled: dict[str, Any]
    added: list[Any]
    at_updates: dict[int, Any]
    terms: list[Any]
    unfolded: tuple[list[Any], dict[str, Any], Seen]

    def as_unfolded(self) -> Outcome:
        """Return the same without weights in the loss, where that leaves gradients as they are."""
        numbers, logs, seen = self.unfolded
        return self._replace(numbers=numbers, logs=logs, seen=seen)


class Window(NamedTuple):
    """A window that was tried.

    Attributes:
        values: that it starts from.
        whole: all samples at once.
        parts: the same samples in parts, each from where the last one ended.
        rounded: runs all samples at once from weights that differ by a rounding: only where the
            others differ by more than few roundings, as it costs as much as the window.
    """

    values: list[Any]
    whole: Outcome
    parts: list[Outcome]
    rounded: Callable[[], Outcome]

    @property
    def is_moved(self) -> bool:
        """Whether a gradient is other than zero."""
        gradients = [g for part in self.parts for g in part.gradients if g is not None]
        return any(self.whole.rates) or any((np.isfinite(g) & (g != 0)).any() for g in gradients)

    def as_unfolded(self) -> Window:
        """Return the same without weights in the loss."""
        parts = [part.as_unfolded() for part in self.parts]
        return self._replace(whole=self.whole.as_unfolded(), parts=parts)

    def shares(self, weighing: Weighing) -> list[float]:
        """Return the share of each part in the window, or NaN."""
        if weighing.is_sum:
            return [1.0] * len(self.parts)
        weights = [_number(weighing.weight(part.seen)) for part in self.parts]
        total = sum(weights) - (len(weights) - 1) * weighing.epsilon
        return [weight / total if total else float("nan") for weight in weights]


def windows(runner: StepRunner, cuts: Cuts, is_brief: bool = False) -> Iterator[Window]:
    """Try windows of samples in parts of these sizes.

    Args:
        runner: runs the step.
        cuts: the ways to cut a window, which windows take in turns.
        is_brief: whether one window is enough, from the state as it is.
    """
    size = sum(np.asarray(value).size for value in runner.start)
    is_brief = is_brief or size > _HUGE
    starts = 1 if is_brief else 2 if size > _LARGE else len(_NOISE)
    chosen: _Entries | None = None
    without_gradient, is_seen = [], False  # if all starts are so, nothing is seen of the step
    for number, noise in enumerate(_NOISE[:starts]):
        values, sizes = _perturbed(runner, noise, number), cuts[number % len(cuts)]
        if (whole := _finite(runner, sum(sizes), values)) is None:
            continue
        chosen = chosen or _Entries(whole)
        scales = [values[place] for place in runner.scales]
        start = _Start(noise, number, sizes, scales, chosen, chosen.of(whole))
        if not any(whole.rates):
            without_gradient.append(start)
        elif window := _in_parts(runner, start, values):
            is_seen = True
            yield window
    for start in without_gradient if is_seen else without_gradient[:1]:
        window = _in_parts(runner, start)
        if window and (is_seen or window.is_moved):
            yield window


class _Start(NamedTuple):
    """What a window starts from.

    Attributes:
        noise, seed: that weights are perturbed by.
        sizes: of the parts that the window is cut into.
        scales: values of the scales of losses.
        chosen: the entries that are compared.
        whole: what all samples at once have made of it.
    """

    noise: float
    seed: int
    sizes: tuple[int, ...]
    scales: list[Any]
    chosen: _Entries
    whole: Outcome

    def values(self, runner: StepRunner) -> list[Any]:
        """Return the values of all variables, which are not held."""
        found = _perturbed(runner, self.noise, self.seed)
        for place, scale in zip(runner.scales, self.scales):
            found[place] = scale
        return found


def _in_parts(runner: StepRunner, start: _Start, values: list[Any] | None = None) -> Window | None:
    """Try a window in parts.

    Args:
        values: of the start, if they are at hand.

    Returns:
        The window, or None: it shows nothing, as numbers are not finite.
    """
    numbers = [v for v in (*start.whole.numbers, *start.whole.logs.values()) if v is not None]
    if start.seed and not all(np.isfinite(v).all() for v in numbers):
        return None
    values = start.values(runner) if values is None else values
    parts, state, begin, total = [], values, 0, sum(start.sizes)
    runner.put_back()
    for size in start.sizes:
        part = runner.run(begin, begin + size, state, start.whole)
        state, begin = part.values, begin + size
        # The last part has all of them.
        parts.append(start.chosen.of(part if begin == total else part._replace(values=[])))
    if (runner.rounding > runner.epsilon or runner.scales) and _overflows(parts):
        return None

    @functools.cache
    def rounded() -> Outcome:
        moved = _rounded(runner, start.values(runner))
        return start.chosen.of(_from_start(runner, total, moved))

    return Window(start.chosen.values(values), start.whole, parts, rounded)


class _Entries:
    """The entries that are compared of large arrays: those of the largest gradients, and others.

    Args:
        outcome: of all samples.
    """

    def __init__(self, outcome: Outcome) -> None:
        generator = np.random.default_rng(0)
        of_places = dict(zip(outcome.places, outcome.gradients))
        self._chosen: dict[int, Any] = {}  # places in arrays, by places of variables
        for place, value in enumerate(outcome.values):
            if (size := np.asarray(value).size) <= _MANY:
                continue
            chosen = generator.integers(0, size, _MANY // 2)
            if (gradient := of_places.get(place)) is not None:
                sizes = np.abs(np.asarray(gradient).ravel())
                largest = np.argpartition(sizes, size - _MANY // 2)[size - _MANY // 2 :]
                chosen = np.concatenate([chosen, largest])
            is_chosen = np.zeros(size, bool)
            is_chosen[chosen] = True
            self._chosen[place] = np.flatnonzero(is_chosen)

    def values(self, values: Sequence[Any]) -> list[Any]:
        """Return those of values of all variables, or of nothing."""
        return [self._part(place, value) for place, value in enumerate(values)]

    def of(self, outcome: Outcome) -> Outcome:
        """Return an outcome with no others."""
        pairs = zip(outcome.places, outcome.gradients)
        gradients = [None if g is None else self._part(place, g) for place, g in pairs]
        return outcome._replace(gradients=gradients, values=self.values(outcome.values))

    def _part(self, place: int, array: Any) -> Any:
        chosen = self._chosen.get(place)
        return array if chosen is None else np.asarray(array).ravel()[chosen]


def _from_start(runner: StepRunner, total: int, values: list[Any]) -> Outcome:
    """Run the step on the samples of a window at once."""
    runner.put_back()
    return runner.run(0, total, values)


def _finite(runner: StepRunner, total: int, values: list[Any]) -> Outcome | None:
    """Run the step on all samples, with smaller scales of the loss in `values` if it overflows."""
    for factor in _SCALES if runner.scales else _SCALES[:1]:
        for place in runner.scales:
            values[place] = np.asarray(values[place] * factor, np.asarray(values[place]).dtype)
        outcome = _from_start(runner, total, values)
        if not _overflows([outcome]):
            return outcome
    return None


def _overflows(outcomes: Sequence[Outcome]) -> bool:
    """Return whether gradients are not all finite, or nearly not, as those of a scaled loss."""
    gradients = [g for outcome in outcomes for g in outcome.gradients if g is not None]
    return not all((np.abs(gradient) < _INFINITE).all() for gradient in gradients)


def norm_of(arrays: Sequence[Any]) -> float:
    """Return the norm of all numbers in arrays."""
    # Not by `np.linalg.norm`, whose threads wait for those of PyTorch.
    return float(sum(np.sum(np.square(np.asarray(a, "float64"))) for a in arrays) ** 0.5)


def _number(value: Any) -> float:
    return float(np.asarray(value))


def _perturbed(runner: StepRunner, noise: float, seed: int) -> list[Any]:
    """Return values with noise that shows also in weights that are zero."""
    if not noise:
        return list(runner.start)
    generator, found = np.random.default_rng(seed), list(runner.start)
    for place, value in enumerate(runner.start):
        value = np.asarray(value)
        if place in runner.trained and value.dtype.kind != "i":
            scale = noise * max(norm_of([value]) / max(value.size, 1) ** 0.5, 0.1)
            moved = value + scale * generator.standard_normal(value.shape, "float32")
        elif not runner.is_moved[place] or value.size != 1:
            continue
        elif value.dtype.kind in "iu":  # a counter
            most = int(np.iinfo(value.dtype).max)
            moved = np.minimum(value.astype("int64") + int(10 ** min(2 * noise, 5)), most)
        else:  # a factor that is annealed
            moved = value + noise * generator.random()
        found[place] = np.asarray(moved).astype(value.dtype)
    return found


def _rounded(runner: StepRunner, values: list[Any]) -> list[Any]:
    generator, found = np.random.default_rng(1), list(values)
    for place in runner.trained:
        found[place] = rounded(np.asarray(values[place]), runner.rounding, generator)
    return found


def rounded(value: Any, rounding: float, generator: Any) -> Any:
    """Return an array whose entries differ by a relative rounding, in directions by chance."""
    signs = generator.choice([-1.0, 1.0], value.shape)
    return (value.astype("float64") * (1 + rounding * signs)).astype(value.dtype)
