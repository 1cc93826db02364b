"""The result of a trial: the weights of microbatches, and the remaining differences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ga_model.base import _numbers
from ga_model.core.losses import Kinds
from ga_model.core.proof.noted import site_of
from ga_model.core.proof.weighing import Seen, Watched, Weighing

WATCHED = 1e-5  # relative, of what is watched
LAST = Weighing("last")  # the number of the last microbatch stands for all


class Difference(NamedTuple):
    """Something that does not come out the same.

    Attributes:
        what: a gradient, a variable, a log.
        size: how much, relative to what it is, or to how much it changes.
    """

    what: str
    size: float

    @property
    def is_only_shown(self) -> bool:
        """Whether it is in a metric or a log, and weights are those of the full batch."""
        return self.what.startswith(("the metric ", "the log "))


class Verdict(NamedTuple):
    """The verdict on a step.

    Attributes:
        weighing: of its gradients.
        numbers: of what it gives to metrics, in this order; None where nothing fits.
        logs: of scalars that it logs, with their names; None where nothing fits.
        differences: what differs from the full batch nevertheless: gradients, variables, logs.
        otherwise: of numbers and logs that nothing else is known of.
        is_folded: whether the weight is that of Keras's loss, and is to be folded into it.
        kinds: of losses of the user's own, where Keras's step runs.
        scalars: names of what the step may divide by, as it was tried.
        watched: of these, what training may show to be another than in all that was tried.
        written: paths of the variables that the step writes to.
        has_seen_zero: whether a microbatch without weight was tried.
        is_tried: whether this was found by trying the step.
        fitting: all weighings of its gradients that are exact in what was tried.
    """

    weighing: Weighing
    numbers: tuple[Weighing | None, ...] = ()
    logs: tuple[tuple[str, Weighing | None], ...] = ()
    differences: tuple[Difference, ...] = ()
    otherwise: Weighing = Weighing("samples")
    is_folded: bool = False
    kinds: Kinds = Kinds()
    scalars: tuple[str, ...] = ()
    watched: tuple[Watched, ...] = ()
    written: tuple[str, ...] = ()
    has_seen_zero: bool = False
    is_tried: bool = False
    fitting: tuple[Weighing, ...] = ()

    @property
    def is_exact(self) -> bool:
        return not self.differences

    @property
    def is_watched(self) -> bool:
        """Whether the step is tried again if training shows something new."""
        return self.is_tried and self.is_exact

    @property
    def needed_scalars(self) -> list[str]:
        """The names of scalars that something is weighed by."""
        weighings = [self.weighing, *self.numbers, *(weighing for _, weighing in self.logs)]
        return sorted({w.source for w in weighings if w is not None and w.is_divisor})

    def is_known_in(self, seen: Seen, has_split_calls: bool) -> bool:
        """Return whether a microbatch shows what it was found to be weighed by, where it was.

        Where calls of layers are split, what these divide by shows otherwise, or not at all, and
        another scalar may come to stand in the place.
        """
        last = max(self.needed_scalars, default="")
        limit = "~" if has_split_calls and last else last
        found, known = (
            {site_of(n) for n in names if n <= limit} for names in (seen.scalars, self.scalars)
        )
        return found == known and set(self.needed_scalars) <= set(seen.scalars)

    def news_in(self, seen: Seen, written: Sequence[Any]) -> Any:
        """Return whether a microbatch shows what no sample that was tried did: a bool or a scalar.

        Args:
            seen: what it shows.
            written: the variables that its step has written to.
        """
        news: Any = not {variable.path for variable in written} <= set(self.written)
        known = zip(sorted(seen.scalars), self.scalars)
        same = {name for name, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], known)}
        weight = self.weighing.weight(seen) if self.weighing.source in (*same, "samples") else None
        if self.weighing.is_divisor and weight is not None and not self.has_seen_zero:
            news = news | (weight == 0)
        for watched in self.watched:
            factor = weight if watched.is_per_weight else 1.0
            if watched.name not in same or factor is None:
                continue
            expected = watched.value * factor
            is_near = abs(seen.scalars[watched.name] - expected) <= WATCHED * abs(expected)
            news = news | _numbers.is_not(is_near)
        return news

    def after_news(self, found: Verdict) -> Verdict:
        """Return the verdict with that of a later trial, without watching what has changed since.

        Microbatches weigh what is exact in all samples that were tried. Where nothing is, what
        served until then still does.
        """
        if not found.is_exact:
            return self._replace(differences=found.differences)
        if found.weighing != self.weighing:
            common = tuple(w for w in found.fitting if w.is_in(self.fitting))
            if found.weighing in common:
                return found._replace(fitting=common)
            if common:
                return found._replace(weighing=common[0], is_folded=False, fitting=common)
            if found.weighing.source not in ("loss", "samples", "sum", *self.scalars):
                return found  # which no sample before could show
            return self._replace(differences=(Difference("what a microbatch weighs", inf),))
        known = {(w.name, w.is_per_weight): w.value for w in self.watched}
        watched = tuple(
            w
            for w in found.watched
            if np.isclose(w.value, known.get((w.name, w.is_per_weight), inf), rtol=WATCHED, atol=0)
        )
        has_seen_zero = self.has_seen_zero or found.has_seen_zero
        return found._replace(watched=watched, has_seen_zero=has_seen_zero)

    def watches_as(self, other: Verdict) -> bool:
        """Return whether the same is news to this verdict as to another one."""
        mine, others = (
            ({w.name for w in v.watched}, v.has_seen_zero, v.written) for v in (self, other)
        )
        return mine == others

    def without_news(self, written: Iterable[str]) -> Verdict:
        """Return the verdict to which nothing is news that writes to these variables."""
        every = tuple(sorted({*self.written, *written}))
        return self._replace(watched=(), has_seen_zero=True, written=every)

    def of_log(self, name: str) -> Weighing:
        """Return how a scalar that the step logs is put together."""
        return self._known(dict(self.logs).get(name))

    def of_number(self, place: int) -> Weighing:
        """Return the same of a number that a metric gets."""
        return self._known(self.numbers[place] if place < len(self.numbers) else None)

    def _known(self, weighing: Weighing | None) -> Weighing:
        # What is as in the last microbatch is the same in all, or nearly so.
        return self.otherwise if weighing is None or weighing == LAST else weighing


# Of a step of Keras's, without code of the user's own.
OF_KERAS = Verdict(Weighing("loss"), is_folded=True)
