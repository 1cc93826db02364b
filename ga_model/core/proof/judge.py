"""Compare the windows of a trial: find the weights of microbatches, and what still differs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, TypeVar

import numpy as np

from ga_model.core.losses import Kinds
from ga_model.core.proof.noted import may_bound
from ga_model.core.proof.runner import StepRunner
from ga_model.core.proof.verdict import LAST, WATCHED, Difference, Verdict
from ga_model.core.proof.weighing import Watched, Weighing
from ga_model.core.proof.windows import Outcome, Window, norm_of

T = TypeVar("T")
_TOLERANCE = 2e-4  # relative; covers rounding that many float32 operations have amplified


class Judge:
    """Compares windows. Differences of a few roundings count as none, and larger ones only if
    rounding changes the full batch as much.

    Args:
        runner, tried: windows of the same samples, and their runner.
    """

    def __init__(self, runner: StepRunner, tried: Sequence[Window]) -> None:
        self.runner = runner
        # Tolerated multiple of the effect of rounding weights, which half precision makes larger.
        self._factor = 10.0 if runner.rounding == runner.epsilon else 4.0
        self._windows, self._is_folded = tried, runner.is_folded
        self._has_noise = False  # whether the effect of rounding is measured
        self._outcomes = [o for window in tried for o in (window.whole, *window.parts)]
        has_weight = all(outcome.seen.loss_weight is not None for outcome in self._outcomes)
        self._has_weight = has_weight and (runner.is_folded or runner.says_weight)
        self._candidates = list(self._weighings())

    @functools.cached_property
    def _scalars(self) -> list[str]:
        """The names of the scalars that are in all outcomes."""
        return sorted(set.intersection(*(set(o.seen.scalars) for o in self._outcomes)))

    @functools.cached_property
    def _has_one_order(self) -> bool:
        """Whether the parts update the same variables in the same order as the full batch."""
        return all(part.places == w.whole.places for w in self._windows for part in w.parts)

    @property
    def is_moved(self) -> bool:
        """Whether any gradient is nonzero."""
        gradients = (g for o in self._outcomes for g in o.gradients if g is not None)
        is_moved = any(any(outcome.rates) for outcome in self._outcomes)
        return is_moved or any((np.isfinite(g) & (g != 0)).any() for g in gradients)

    def _weighings(self) -> Iterator[Weighing]:
        """Yield ways to weigh microbatches, the most specific first.

        A divisor of the step may equal the number of samples by chance, so divisors come before
        that number, and before the assumed denominator of a user's own loss. Divisors come in the
        order of the step, by name: a number before its bound, which the step divides by, and first
        with that bound. Scalars that follow from shapes alone come last.
        """
        tried, of_shapes = self._windows, self.runner.of_shapes
        if all(len(window.parts) == 1 for window in tried):
            yield Weighing("samples")  # any weight is exact
            return
        sources = [name for name in self._scalars if name not in of_shapes]
        if self._has_weight:
            sources = [*sources, "loss"] if self.runner.has_own_loss else ["loss", *sources]
        sources += ["samples", *(name for name in self._scalars if name in of_shapes)]
        known_shares: list[list[float]] = []
        bounded = self._bounded()
        variants = ((*bounded.get(source, ()), *_variants(source, tried)) for source in sources)
        for weighing in itertools.chain.from_iterable(variants):
            shares = [share for window in tried for share in window.shares(weighing)]
            if weighing.source in of_shapes and 0 in shares:
                continue  # a part has samples, but a divisor of 0: the step treats few differently
            is_known = any(np.allclose(shares, other, rtol=1e-9, atol=0) for other in known_shares)
            is_needed = weighing == Weighing("samples") or weighing.source in bounded
            if np.isfinite(shares).all() and (not is_known or is_needed):
                known_shares.append(shares)
                yield weighing
        yield Weighing("sum")

    def _bounded(self) -> dict[str, tuple[Weighing]]:
        """Return the weighings by numbers that the step bounds with a constant, by their names.

        An operation notes its two arguments, in any order, and then its result. These show the
        bound, even if no part is at it.
        """
        names, values, found = self._scalars, self._values_of, dict[str, tuple[Weighing]]()
        for first, second, result in filter(may_bound, zip(names, names[1:], names[2:])):
            for number, other in (first, second), (second, first):
                found_values, least = values(number), values(other)
                bounded = np.maximum(found_values, least)
                # A constant above the bound, such as a number of outputs, is no weight.
                may_weigh = np.ptp(found_values) > 0 or found_values[0] < least[0]
                is_constant = least[0] > 0 and not np.ptp(least)
                if may_weigh and is_constant and np.array_equal(bounded, values(result)):
                    found[number] = (Weighing(number, least=float(least[0])),)
        return found

    def _values_of(self, name: str) -> np.ndarray:
        """Return the values of a scalar in all outcomes."""
        return np.asarray([float(outcome.seen.scalars[name]) for outcome in self._outcomes])

    @functools.cached_property
    def verdict(self) -> Verdict:
        """The verdict on the step."""
        return self._decide(self._verdict, lambda verdict: verdict.is_exact)

    def _decide(self, judge: Callable[[], T], is_good: Callable[[T], bool]) -> T:
        """Return a judgement. The costly effect of rounding is measured only if it is not good."""
        self._has_noise = self.runner.rounding > self.runner.epsilon
        if not is_good(judgement := judge()) and not self._has_noise:
            self._has_noise = True
            judgement = judge()
        return judgement

    def _verdict(self) -> Verdict:
        off = {w: self._gradient_differences(w) for w in self._candidates}
        exact = [weighing for weighing, differing in off.items() if not differing]
        plain = [w for w in self._candidates if w.source in ("loss", "samples", "sum")]
        weighing = exact[0] if exact else min(plain, key=lambda w: _badness(off[w]))
        differences = _by_size(off[weighing])
        of_variables = _by_size(self._value_differences(weighing))
        differences += [d for d in of_variables if _gradient_of(d.what) not in off[weighing]]
        first = self._windows[0].whole
        keys = first.compared(self._is_folded)
        numbers = tuple((key, self._reduction(_getter("numbers", key))) for key in keys)
        differences += [Difference(first.about[key][0], inf) for key, w in numbers if w is None]
        by_loss = first.seen.loss_weight is None if weighing.is_sum else weighing.source == "loss"
        is_folded = self._is_folded and by_loss
        scalars = tuple(sorted(first.seen.scalars))
        return Verdict(
            weighing,
            numbers,
            tuple(differences),
            is_folded=is_folded,
            scalars=scalars,
            watched=tuple(self._watched(weighing)),
            written=tuple(sorted(self.runner.written)),
            has_seen_rare=weighing.is_divisor
            and any(map(weighing.is_rare, (o.seen for o in self._outcomes))),
            is_tried=True,
            fitting=tuple(exact),
        )

    def agrees(self, known: Verdict) -> bool:
        """Return whether these windows agree with an earlier verdict."""
        return self._decide(functools.partial(self._agrees, known), bool)

    def _agrees(self, known: Verdict) -> bool:
        return not (
            self._gradient_differences(known.weighing)
            or self._value_differences(known.weighing)
            or any(
                not self._fits(weighing, _getter("numbers", key))
                for key, weighing in known.numbers
                if weighing is not None and weighing != LAST
            )
        )

    def _watched(self, weighing: Weighing) -> Iterator[Watched]:
        """Yield the scalars that were constant in all outcomes, or proportional to the weight."""
        outcomes, weights = self._outcomes, np.ones(len(self._outcomes))
        if weighing.source not in ("loss", "sum"):
            weights = np.asarray([outcome.weight(weighing) for outcome in outcomes])
        for name in self._scalars:
            values = self._values_of(name)
            if name == weighing.source and 0 < weighing.least >= values.max():
                yield Watched(name, 0.0, False)  # all were at the bound, as if the loss were a sum
            if name == weighing.source or name in self.runner.unwatched:
                continue
            for is_per_weight in (False, True) if weights.all() else (False,):
                ratios = values / weights if is_per_weight else values
                if np.isfinite(ratios).all() and np.ptp(ratios) <= WATCHED * abs(ratios[0]) / 2:
                    yield Watched(name, float(ratios[0]), is_per_weight)
                    break

    def kinds(self) -> Kinds:
        """Return which of the user's own losses are means over samples, and which are sums."""
        first = self._windows[0].whole
        compiled = ((n, self._kind(_getter("compiled", n))) for n in sorted(first.compiled))
        return Kinds(tuple(compiled), tuple(self._kind(_getter("added", n)) for n in first.added))

    def _kind(self, get: Callable[[Outcome], Any]) -> str:
        def fitting() -> list[str]:
            kinds = {"mean": "samples", "sum": "sum"}
            return [kind for kind, source in kinds.items() if self._fits(Weighing(source), get)]

        return (self._decide(fitting, bool) or ["mean"])[0]

    def _gradient_differences(self, weighing: Weighing) -> dict[str, float]:
        """Return relative differences of gradients that are summed by a weighing, by name.

        Each is of the first window that differs, since the first starts from the actual weights.
        """
        if not self._has_one_order:
            return {"the order of updates": inf}
        differences: dict[str, float] = {}
        for window in self._windows:
            shares = window.shares(weighing)
            for number, place in enumerate(window.whole.places):
                if size := self._gradient_difference(window, number, shares):
                    differences.setdefault(_gradient_of(self.runner.names[place]), size)
        return differences

    def _gradient_difference(self, window: Window, place: int, shares: list[float]) -> float:
        whole = window.whole.gradients[place]
        parts = [part.gradients[place] for part in window.parts]
        if whole is None and all(part is None for part in parts):
            return 0.0
        if whole is None or any(part is None for part in parts):
            return inf
        summed = _weighted_sum(shares, parts)
        norms = [part.norms[place] for part in window.parts]
        largest = max((abs(s) * size for s, size in zip(shares, norms) if s), default=0.0)
        floor = 100 * self.runner.epsilon * (largest + norm_of([window.whole.norms]))
        floor += self._noise(window, _getter("gradients", place))
        return self._difference(summed, whole, floor, window.whole.norms[place])

    def _value_differences(self, weighing: Weighing) -> dict[str, float]:
        """Return relative differences of variables after the update, by name, if it is one."""
        runner, differences = self.runner, dict[str, float]()

        def compare(place: int, value: np.ndarray, floor: float, size: float) -> None:
            if difference := self._difference(final[place], value, floor, size):
                name = runner.names[place]
                differences.setdefault(name, difference)

        for window in self._windows if self._has_one_order else ():
            final = [np.asarray(value).astype("float64") for value in window.parts[-1].values]
            shares = window.shares(weighing)
            rounding = 100 * runner.epsilon * norm_of([window.whole.norms])
            rates = list(zip(window.whole.places, window.whole.rates))
            floors = {place: rate * rounding for place, rate in rates}
            for number, (place, rate) in enumerate(rates):
                parts = [part.gradients[number] for part in window.parts]
                if all(part is not None for part in parts):
                    final[place] = final[place] - rate * _weighted_sum(shares, parts)
            for place in window.whole.counters:
                final[place] = final[place] + 1
            for place, value in window.whole.at_updates.items():  # a window updates after its parts
                size = norm_of([value])
                compare(place, value, 100 * runner.epsilon * size, size)
            for place, value in enumerate(window.whole.values):
                value = np.asarray(value).astype("float64")
                if place in runner.ignored:
                    continue
                moved = norm_of([value - np.asarray(window.values[place], "float64")])
                floor = 100 * runner.epsilon * norm_of([value]) + floors.get(place, 0.0)
                floor += self._noise(window, _getter("values", place))
                compare(place, value, floor, moved)
        return differences

    def _reduction(self, get: Callable[[Outcome], Any]) -> Weighing | None:
        """Return the weighing that gives the full batch's number from those of parts, or None."""
        return next((w for w in (LAST, *self._candidates) if self._fits(w, get)), None)

    def _fits(self, weighing: Weighing, get: Callable[[Outcome], Any]) -> bool:
        """Return whether a weighing gives the full batch's number from those of parts."""
        return all(self._fits_in(window, weighing, get) for window in self._windows)

    def _fits_in(self, window: Window, weighing: Weighing, get: Callable[[Outcome], Any]) -> bool:
        whole = get(window.whole)
        parts = [get(part) for part in window.parts]
        if whole is None or any(part is None for part in parts):
            return False
        if any(np.shape(part) != np.shape(whole) for part in parts):
            return False
        combined = _weighted_sum(window.shares(weighing), parts)
        norms = [norm_of([part]) for part in parts if np.isfinite(part).all()]
        floor = 100 * self.runner.epsilon * max(norms, default=0.0) + self._noise(window, get)
        return not self._difference(combined, whole, floor, norm_of([whole]))

    def _noise(self, window: Window, get: Callable[[Outcome], Any]) -> float:
        """Return the tolerated effect of rounding on a number of the full batch, if measured."""
        if not self._has_noise:
            return 0.0
        whole, rounded = (np.asarray(get(o), "float64") for o in (window.whole, window.rounded()))
        return self._factor * norm_of([rounded - whole])

    def _difference(
        self, actual: np.ndarray, expected: np.ndarray, floor: float, size: float
    ) -> float:
        """Return a relative difference, or zero if rounding explains it."""
        actual, expected = (np.asarray(value, "float64") for value in (actual, expected))
        if np.array_equal(actual, expected, equal_nan=True):  # such as a metric of constant values
            return 0.0
        difference = norm_of([actual - expected])
        if not (np.isfinite(difference) and np.isfinite(size)):
            return inf
        if difference <= floor + max(_TOLERANCE, 2 * self.runner.rounding) * size:
            return 0.0
        return difference / size if size else inf


def _variants(source: str, tried: Sequence[Window]) -> Iterator[Weighing]:
    """Yield the weighings by a number, or by it times the samples, whose weights are additive."""
    plain = Weighing(source)
    of_parts = [[part.weight(plain) for part in window.parts] for window in tried]
    wholes = [window.whole.weight(plain) for window in tried]
    all_weights = [*wholes, *(weight for weights in of_parts for weight in weights)]
    if not np.isfinite(all_weights).all() or len(set(all_weights)) == 1:
        return  # a constant
    extra = [(sum(parts) - whole) / (len(parts) - 1) for whole, parts in zip(wholes, of_parts)]
    size = 1e-5 * max(map(abs, all_weights))
    if all(abs(more) <= size for more in extra):
        yield plain
    # Parts that are all equal may be at a bound, which looks like an epsilon.
    elif min(extra) > size and max(extra) - min(extra) <= size < np.ptp(np.concatenate(of_parts)):
        yield Weighing(source, epsilon=float(np.mean(extra)))
    by_sample = Weighing(source, times_samples=True)
    pairs = [
        (window.whole.weight(by_sample), sum(part.weight(by_sample) for part in window.parts))
        for window in tried
    ]
    if all(abs(whole - parts) <= 1e-5 * abs(whole) for whole, parts in pairs):
        yield by_sample


def _weighted_sum(shares: Sequence[float], parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return a weighted sum, without parts of weight 0, which may be NaN."""
    pairs = [(share, np.asarray(part, "float64")) for share, part in zip(shares, parts)]
    zero = np.zeros_like(pairs[0][1])
    return sum((share * part for share, part in pairs if share), zero)


def _badness(off: dict[str, float]) -> tuple[int, float]:
    return len(off), sum(min(size, 9.0) for size in off.values())


def _by_size(off: dict[str, float]) -> list[Difference]:
    return sorted(itertools.starmap(Difference, off.items()), key=lambda found: -found.size)


def _gradient_of(name: str) -> str:
    return f"the gradient of {name}"


def _getter(field: str, key: int | str) -> Callable[[Outcome], Any]:
    """Return a getter of one entry of a field of an outcome; it gives None if there is none."""

    def get(outcome: Outcome) -> Any:
        entries = getattr(outcome, field)
        return dict(enumerate(entries) if isinstance(entries, list) else entries).get(key)

    return get
