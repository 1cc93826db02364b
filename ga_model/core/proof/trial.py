"""Try one window both ways: all samples at once, and in parts, from the same state.

The optimizer is stood in for by a *surrogate update*, which moves each weight against its gradient
by a rate. A rate of 0 is what a recorded step does. With others the order of what a step does shows
at any learning rate, and no slot of an optimizer has to be put back. The rates move weights by 3 %
of their norm, so that an effect of the update is far above rounding.

Several starts and cuts are tried: one alone may hide a difference by chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ga_model.core.proof.weighing import Seen, Weighing

_MOVES = 0.03  # of the norm of the weights
_LARGE = 5_000_000  # values, of which fewer windows are tried
_HUGE = 50_000_000  # and of which one is: some ten copies are held at a time, on the host
_NOISE = (0.0, 0.3, 2.0, 8.0)  # of the starts, in standard deviations of a weight


Sizes = tuple[int, ...]  # samples of the parts of a window


class Outcome(NamedTuple):
    """What the step makes of some samples.

    Attributes:
        gradients: of the variables that the step updates, in its order, or None.
        places: of these variables among all.
        counters: places of the counts of updates of the optimizers that it applies.
        values: of all variables, after the step.
        numbers: what metrics got that waits for the full batch, None of those of compiled losses.
        logs: scalars that the step logs and that are no results of metrics.
        seen: what tells the weight.
        compiled: values of compiled losses of the user's own that are numbers, by name.
        added: values of losses that layers add.
    """

    gradients: list[Any]
    places: list[int]
    counters: list[int]
    values: list[Any]
    numbers: list[Any]
    logs: dict[str, Any]
    seen: Seen
    compiled: dict[str, Any]
    added: list[Any]


class Runner(Protocol):
    """Runs the step of a model.

    Attributes:
        start: values of all variables, as they are.
        names: of the variables.
        metrics: names of those that got the numbers of an outcome, after a run.
        trained: places of the trained variables.
        is_free: of each variable, whether it may be anything after a step: a random state.
        is_moved: of each variable that is not trained, whether starts may differ in it.
        epsilon: the rounding of one operation in float32.
        has_own_loss: whether the loss, or a part of it, is the user's own.
        is_folded: whether weights of compiled losses are folded into the loss.
        written: paths of the variables that the step has written to.
    """

    start: list[Any]
    names: list[str]
    metrics: list[str]
    trained: list[int]
    is_free: list[bool]
    is_moved: list[bool]
    epsilon: float
    has_own_loss: bool
    is_folded: bool
    written: set[str]

    @property
    def rounding(self) -> float:
        """The rounding of one operation in the precision of the model."""

    def put_back(self) -> None:
        """Let all be as it was that is kept in no variable, and that runs go on from."""

    def run(self, begin: int, end: int, values: list[Any], rate: float) -> Outcome:
        """Run the step on samples from `begin` up to `end`, from values of all variables.

        Args:
            rate: of the surrogate update.
        """


class Window(NamedTuple):
    """A window that was tried.

    Attributes:
        values: that it starts from.
        rate: of its update.
        whole: all samples at once.
        rounded: the same, from weights that differ by a rounding.
        parts: the same samples in parts, each from where the last one ended.
    """

    values: list[Any]
    rate: float
    whole: Outcome
    rounded: Outcome
    parts: list[Outcome]

    def shares(self, weighing: Weighing) -> list[float]:
        """Return what each part counts in the window, or NaN."""
        if weighing.is_sum:
            return [1.0] * len(self.parts)
        weights = [_number(weighing.weight(part.seen)) for part in self.parts]
        total = sum(weights) - (len(weights) - 1) * weighing.once
        return [weight / total if total else float("nan") for weight in weights]


def windows(runner: Runner, sizes: Sizes, is_brief: bool = False) -> Iterator[Window]:
    """Try windows of samples in parts of these sizes, in other orders, too.

    Args:
        runner: runs the step.
        sizes: of the parts.
        is_brief: whether one window is enough, from the state as it is.
    """
    total = sum(sizes)
    orders = [sizes[i:] + sizes[:i] for i in range(len(sizes))]
    cuts = [tuple(itertools.accumulate(order)) for order in orders]
    size = sum(np.asarray(value).size for value in runner.start)
    is_large, is_brief = size > _LARGE, is_brief or size > _HUGE
    starts = 1 if is_brief else 2 if is_large else len(_NOISE)
    for number, noise in enumerate(_NOISE[:starts]):
        values = _perturbed(runner, noise, number)
        unmoved = _from_start(runner, total, values, 0.0)
        gradients = [g for g in unmoved.gradients if g is not None]
        if not all(np.isfinite(g).all() for g in gradients):
            continue
        norm = norm_of(gradients)
        far = norm_of([values[place] for place in runner.trained]) or 1.0
        rate = _MOVES * far / norm if norm and np.isfinite(norm) else 0.0
        whole = _from_start(runner, total, values, rate)
        numbers = [v for v in (*whole.numbers, *whole.logs.values()) if v is not None]
        if number and not all(np.isfinite(v).all() for v in numbers):
            continue
        rounded = _from_start(runner, total, _rounded(runner, values), rate)
        of_start = cuts[: starts if is_large or is_brief else len(cuts)]
        if not (number or is_brief):
            of_start = [*of_start, *_finer(sizes)]
        for ends in of_start:
            parts, state, begin = [], values, 0
            runner.put_back()
            for end in ends:
                parts.append(runner.run(begin, end, state, 0.0))
                state, begin = parts[-1].values, end
                if end < total:  # the last part has all of them
                    parts[-1] = parts[-1]._replace(values=[])
            is_half = runner.rounding > runner.epsilon
            if not (is_half and _overflows(parts)):
                yield Window(values, rate, whole, rounded, parts)


def _from_start(runner: Runner, total: int, values: list[Any], rate: float) -> Outcome:
    """Run the step on all samples, from where windows begin."""
    runner.put_back()
    return runner.run(0, total, values, rate)


def _finer(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return a cut into more parts of the same sizes, if there is one.

    Parts of always the same sizes may seem to weigh what others do not.
    """
    rest, least = sum(sizes[1:]), min(sizes)
    if rest % least or rest // least == len(sizes) - 1:
        return []
    return [tuple(itertools.accumulate((sizes[0], *[least] * (rest // least))))]


def _overflows(parts: Sequence[Outcome]) -> bool:
    """Return whether parts have no finite gradients, as of a scaled loss in half precision."""
    gradients = [g for part in parts for g in part.gradients if g is not None]
    return not all(np.isfinite(gradient).all() for gradient in gradients)


def norm_of(arrays: Sequence[Any]) -> float:
    """Return the norm of all numbers in arrays."""
    return float(sum(np.linalg.norm(np.asarray(a, "float64").ravel()) ** 2 for a in arrays) ** 0.5)


def _number(value: Any) -> float:
    return float(np.asarray(value))


def _perturbed(runner: Runner, noise: float, seed: int) -> list[Any]:
    """Return values with noise that shows also in weights that are zero."""
    if not noise:
        return list(runner.start)
    generator, found = np.random.default_rng(seed), list(runner.start)
    for place, value in enumerate(runner.start):
        value = np.asarray(value)
        if place in runner.trained and value.dtype.kind != "i":
            scale = noise * max(norm_of([value]) / max(value.size, 1) ** 0.5, 0.1)
            moved = value.astype("float64") + scale * generator.normal(size=value.shape)
        elif not runner.is_moved[place] or value.size != 1:
            continue
        elif value.dtype.kind in "iu":  # a counter
            most = int(np.iinfo(value.dtype).max)
            moved = np.minimum(value.astype("int64") + int(10 ** min(2 * noise, 5)), most)
        else:  # a factor that is annealed
            moved = value + noise * generator.random()
        found[place] = np.asarray(moved).astype(value.dtype)
    return found


def _rounded(runner: Runner, values: list[Any]) -> list[Any]:
    generator, found = np.random.default_rng(1), list(values)
    for place in runner.trained:
        value = np.asarray(values[place])
        signs = generator.choice([-1.0, 1.0], value.shape)
        found[place] = (value.astype("float64") * (1 + runner.rounding * signs)).astype(value.dtype)
    return found
