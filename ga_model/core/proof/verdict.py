"""The result of a trial: the weights of microbatches, and the remaining differences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

import keras
import numpy as np

from ga_model.base import _numbers
from ga_model.base._types import Scalar
from ga_model.core.losses import Kinds
from ga_model.core.proof.noted import site_of
from ga_model.core.proof.weighing import Seen, Watched, Weighing

WATCHED = 1e-5  # relative tolerance for watched scalars
LAST = Weighing("last")  # the last microbatch has the number of the full batch


class Difference(NamedTuple):
    """A difference from the full batch.

    Attributes:
        what: name of a gradient, a variable or a log.
        size: relative to the value, or for a variable to its change.
    """

    what: str
    size: float

    @property
    def is_in_logs_only(self) -> bool:
        """Whether only a metric or a log differs, which leaves weights exact."""
        return self.what.startswith(("the metric ", "the log "))


class Verdict(NamedTuple):
    """The verdict on a step.

    Attributes:
        weighing: weighing of its gradients.
        numbers: weighings of the numbers that metrics get, by place, and of logged scalars, by
            name; None where none fits.
        differences: remaining differences from the full batch, in gradients, variables and logs.
        default_weighing: weighing of numbers and logs without one of their own.
        is_folded: whether the weight is the compiled loss's denominator, and is folded into it.
        kinds: reductions of the user's own losses, for Keras's step.
        scalars: names of the scalars that the step divided by, bounded or branched on.
        watched: those of them that had one value in the trial, and may have another in training.
        written: paths of the variables that the step writes to.
        has_seen_rare: whether a microbatch was tried whose weight is zero or bounded.
        is_tried: whether a trial gave this verdict.
        fitting: all weighings of gradients that were exact in the trial.
    """

    weighing: Weighing
    numbers: tuple[tuple[int | str, Weighing | None], ...] = ()
    differences: tuple[Difference, ...] = ()
    default_weighing: Weighing = Weighing("samples")
    is_folded: bool = False
    kinds: Kinds = Kinds()
    scalars: tuple[str, ...] = ()
    watched: tuple[Watched, ...] = ()
    written: tuple[str, ...] = ()
    has_seen_rare: bool = False
    is_tried: bool = False
    fitting: tuple[Weighing, ...] = ()

    @property
    def is_exact(self) -> bool:
        return not self.differences

    @property
    def is_watched(self) -> bool:
        """Whether the step is tried again when training shows something new."""
        return self.is_tried and self.is_exact

    @property
    def needed_scalars(self) -> list[str]:
        """Names of the scalars that are used as weights."""
        weighings = [self.weighing, *(weighing for _, weighing in self.numbers)]
        return sorted({w.source for w in weighings if w is not None and w.is_divisor})

    def is_known_in(self, seen: Seen, has_split_calls: bool) -> bool:
        """Return whether a microbatch has the needed scalars at the same places as in the trial.

        Where calls of layers are split, their divisors are recorded differently or not at all, so
        another scalar may take a place.
        """
        last = max(self.needed_scalars, default="")
        limit = "~" if has_split_calls and last else last
        sites, known_sites = (
            {site_of(n) for n in names if n <= limit} for names in (seen.scalars, self.scalars)
        )
        return sites == known_sites and set(self.needed_scalars) <= set(seen.scalars)

    def shows_news(self, seen: Seen, written: Sequence[keras.Variable]) -> Scalar:
        """Return whether a microbatch shows what the trial did not: a bool or a scalar."""
        news: Scalar = not {variable.path for variable in written} <= set(self.written)
        pairs = zip(sorted(seen.scalars), self.scalars)
        same = {name for name, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)}
        weight = self.weighing.weight(seen) if self.weighing.source in (*same, "samples") else None
        if self.weighing.is_divisor and weight is not None and not self.has_seen_rare:
            news = news | self.weighing.is_rare(seen)
        for watched in self.watched:
            factor = weight if watched.is_per_weight else 1.0
            if watched.name not in same or factor is None:
                continue
            expected = watched.value * factor
            is_near = abs(seen.scalars[watched.name] - expected) <= WATCHED * abs(expected)
            news = news | _numbers.is_not(is_near)
        return news

    def combined_with(self, found: Verdict) -> Verdict:
        """Return this verdict combined with that of a later trial, `found`.

        The weighing is one that was exact in both trials. If there is none, the present one stays.
        Scalars that differ between the trials are watched no longer.
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
                return found  # a divisor that no earlier sample had
            return self._replace(differences=(Difference("what a microbatch weighs", inf),))
        known = {(w.name, w.is_per_weight): w.value for w in self.watched}
        watched = tuple(
            w
            for w in found.watched
            if np.isclose(w.value, known.get((w.name, w.is_per_weight), inf), rtol=WATCHED, atol=0)
        )
        has_seen_rare = self.has_seen_rare or found.has_seen_rare
        return found._replace(watched=watched, has_seen_rare=has_seen_rare)

    def has_same_watch(self, other: Verdict) -> bool:
        """Return whether this verdict and another one watch for the same news."""
        mine, others = (
            ({w.name for w in v.watched}, v.has_seen_rare, v.written) for v in (self, other)
        )
        return mine == others

    def varies_more(self, earlier: Verdict) -> bool:
        """Return whether a scalar varies that an earlier verdict on the same step watches."""
        mine, others = ({w.name for w in v.watched} for v in (self, earlier))
        return self.scalars == earlier.scalars and not others <= mine

    def unwatched(self, written: Iterable[str]) -> Verdict:
        """Return the verdict without watching, for a step that also writes to these variables."""
        every = tuple(sorted({*self.written, *written}))
        return self._replace(watched=(), has_seen_rare=True, written=every)

    def of_number(self, key: int | str) -> Weighing:
        """Return the weighing of a number that a metric gets, or of a logged scalar."""
        weighing = dict(self.numbers).get(key)
        # A number that fits the last microbatch is nearly the same in all.
        return self.default_weighing if weighing is None or weighing == LAST else weighing


# The verdict on Keras's step without user code.
OF_KERAS = Verdict(Weighing("loss"), is_folded=True)
