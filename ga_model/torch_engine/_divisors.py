"""The numbers a loss is divided by, read from the operations of PyTorch's autograd.

A mean over the samples of a microbatch is divided by their number, and one over the samples or
tokens that count by a sum of a mask. Which of the numbers in a loss is the one that it is divided
by as a whole is found out by trying (`_probes`, `_step_probe`): with it the gradients of halves add
up, and so do the numbers themselves. It is then read in each microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ga_model.base._internals_torch import (
    divides_something,
    divisor_of,
    left_out_by,
    takes_leaf,
)
from ga_model.torch_engine._autograd import unheard
from ga_model.torch_engine._not_known import otherwise

_MOST_NODES = 100  # that are looked at, from the loss on


class Divided(NamedTuple):
    """A loss that is a sum over samples divided by a number.

    Attributes:
        place: of the number among those that `divisors_of` returns.
        unit: of that number, in which a microbatch is counted.
    """

    place: int
    unit: float

    def weight(self, divisors: list[float]) -> float | None:
        """Return what a microbatch weighs that has these, or None: there is no such number."""
        return divisors[self.place] / self.unit if self.place < len(divisors) else None

    @otherwise(True)
    def loses(self, loss: Any, inputs: list[Any], until: Iterable[Any] = ()) -> bool:
        """Return whether a loss that is divided by zero would have a gradient if it was not.

        It has none where nothing of a microbatch counts, and that microbatch is no loss.

        Args:
            loss: a tensor, whose number is 0.
            inputs: tensors that the gradient is taken with respect to.
            until: as `divisors_of` takes them.
        """
        inputs = [tensor for tensor in inputs if torch.is_tensor(tensor) and tensor.requires_grad]
        node, left_out, _ = _divisions(loss, until)[self.place]
        with unheard():
            return bool(inputs) and divides_something(loss, node, left_out, inputs)


@otherwise([])
def divisors_of(loss: Any, until: Iterable[Any] = ()) -> list[float]:
    """Return the numbers by which a loss, or parts of it, are divided, as far as they are known.

    One that a loss is not divided by as it is zero, by `divide_no_nan`, is 0.

    Args:
        loss: a tensor.
        until: tensors that the loss is computed of, behind which nothing is looked at.
    """
    return [divisor for _, _, divisor in _divisions(loss, until)]


def _divisions(loss: Any, until: Iterable[Any]) -> list[tuple[Any, tuple[Any, Any] | None, float]]:
    """Return them behind nodes of PyTorch's autograd: the one that divides, and if its result is
    left out, the one that gives what is left out and the one that takes something else.
    """
    ends = {tensor.grad_fn for tensor in until}
    nodes = [loss.grad_fn]
    seen = {None, *ends}
    left_out: dict[Any, tuple[Any, Any]] = {}
    found = []
    for node in nodes:  # which grows
        if node in seen or len(seen) > _MOST_NODES:
            continue
        seen.add(node)
        divisor = divisor_of(node)
        if divisor is not None:
            pair = left_out.get(node)
            is_left_out = pair is not None and pair[0] is node
            found.append((node, pair, 0.0 if is_left_out else divisor))
        following = [behind for behind, _ in node.next_functions]
        if node in left_out:  # and with it what it is computed of
            left_out.update((behind, left_out[node]) for behind in following if behind not in seen)
        if (behind := left_out_by(node)) is not None:
            left_out[behind] = behind, node
        if not takes_leaf(node):  # else it is a layer's, and what is behind it the model
            nodes += following
    return found


class Tried(NamedTuple):
    """The divisors of a loss on a microbatch and on its halves.

    Attributes:
        whole, first, second: divisors.
        rows: samples of the microbatch.
    """

    whole: list[float]
    first: list[float]
    second: list[float]
    rows: int

    def places(self) -> list[int]:
        """Return the places of those that add up over the halves."""
        return [i for i, d in enumerate(self.whole) if d > 0 and self.adds_up(i)]

    def is_complete(self) -> bool:
        """Return whether all have the same places."""
        return len(self.whole) == len(self.first) == len(self.second)

    def adds_up(self, place: int, unit: float = 0.0) -> bool:
        """Return whether the number at a place does, but for what is little beside a unit."""
        if not self.is_complete():
            return False
        first, second = self.first[place], self.second[place]
        least = 1e-6 * unit * self.rows  # such as `max(number, 1e-7)`
        return min(first, second) >= 0.0 and _is_same(self.whole[place], first + second, least)

    def unit(self, place: int) -> float:
        """Return what the number is for each sample."""
        return self.whole[place] / self.rows

    def factors(self, place: int) -> list[float]:
        """Return what the gradients of the halves are multiplied with to add up."""
        return [found[place] / self.whole[place] for found in (self.first, self.second)]


class Watch:
    """What was tried of a loss, and whether its divisors are to its samples what they were then.

    So what is alike in the halves of a microbatch by chance is found where it first differs.

    Args:
        prefers_divisors: whether a loss is taken for divided by a number that it has, and not by
            samples, where both fit.

    Attributes:
        tried: what was tried last, or None.
        takes_divisors: whether a loss may be divided by a number that it has: not with several
            processes, each of which finds out for itself.
    """

    def __init__(self, prefers_divisors: bool, takes_divisors: bool = True) -> None:
        self._prefers_divisors = prefers_divisors
        self.takes_divisors = takes_divisors
        self.tried: Tried | None = None
        self._kind: Any = None
        self._least = math.inf
        self._num_others = 0  # of microbatches

    def has_changed(self, divisors: list[float], rows: int) -> bool:
        """Return whether to try again, with a microbatch that has these."""
        tried, kind = self.tried, self._kind
        if tried is None:
            return False
        if len(divisors) != len(tried.whole):
            return True
        if isinstance(kind, Divided) and divisors[kind.place] < self._least:
            return True  # such as `max(number, 1)`
        if self._changed(divisors, rows):
            return True
        if any(d != then and self._is_constant(i) for i, (d, then) in self._pairs(divisors)):
            self._num_others += 1  # those of sequences of other lengths, say
            return is_to_try(self._num_others)
        return False

    def _changed(self, divisors: list[float], rows: int) -> list[int]:
        """Return the places of those that are another number for each sample."""
        tried, kind = self.tried, self._kind
        if tried is None or not tried.is_complete():
            return []
        units: list[tuple[float, float]] = [(rows, tried.rows)]
        if isinstance(kind, Divided):
            units.append((divisors[kind.place], tried.whole[kind.place]))
        return [
            i
            for i, (d, then) in self._pairs(divisors)
            if not self._is_constant(i)
            and not any(_is_same(d * before, then * now) for now, before in units)
        ]

    def _pairs(self, divisors: list[float]) -> list[tuple[int, tuple[float, float]]]:
        """Return divisors and those that were tried, with their places; but for the loss's own."""
        before = [] if self.tried is None else self.tried.whole
        own = self._kind.place if isinstance(self._kind, Divided) else None
        return [(i, pair) for i, pair in enumerate(zip(divisors, before)) if i != own]

    def _is_constant(self, place: int) -> bool:
        """Return whether one was the same in the halves, whatever their samples are."""
        tried = self.tried
        if tried is None or not tried.is_complete():
            return False
        return tried.whole[place] == tried.first[place] == tried.second[place]

    def kind_of(
        self, fits: Callable[[list[float]], bool], tried: Tried | None, rows: int, half: int
    ) -> Any:
        """Return what a loss is over samples, and note what was tried.

        A mean that turns out to be divided by something else has been so all the time, as long as
        that was the same for each sample.

        Args:
            fits: returns whether the gradients of halves times these factors add up.
            tried: the divisors, or None: they are not known.
            rows, half: samples of the microbatch, and of its first half.

        Returns:
            `Divided`, "mean", "sum" or "other".
        """
        places = tried.places() if tried is not None and self.takes_divisors else []
        means: dict[Any, list[float]] = {
            "mean": [half / rows, 1.0 - half / rows],
            "sum": [1.0, 1.0],
        }
        divided = {
            Divided(i, self._unit(i, tried)): tried.factors(i)
            for i in places
            if tried is not None and (self._kind is None or self._is_possible(i))
        }
        kinds = {**divided, **means} if self._prefers_divisors else {**means, **divided}
        if self._kind == "mean":
            kinds = {"mean": means["mean"], **divided}
        elif self._kind is not None:
            kinds = {kind: factors for kind, factors in kinds.items() if kind == self._kind}
        found = next((kind for kind, factors in kinds.items() if fits(factors)), "other")
        return self.note(tried, found)

    def note(self, tried: Tried | None, kind: Any) -> Any:
        """Note what was found, and return it."""
        if kind != "other":
            self.tried, self._kind = tried, kind
        if tried is not None and isinstance(kind, Divided):
            self._least = min(self._least, tried.whole[kind.place])
        return kind

    def kind_without_gradient(self, tried: Tried | None) -> Any:
        """Return what a loss is of a microbatch whose gradient is zero or not finite, or None.

        Its samples tell nothing, but what it is divided by may.
        """
        known = self._kind
        if tried is None or self.tried is None or not self.has_changed(tried.whole, tried.rows):
            return None
        if isinstance(known, Divided):
            is_same = known.place < len(tried.whole) and tried.adds_up(known.place, known.unit)
            return known if is_same else "other"
        changed = self._changed(tried.whole, tried.rows)
        if known == "mean" and len(changed) == 1 and self._is_possible(changed[0]):
            found = Divided(changed[0], self.tried.unit(changed[0]))
            if tried.adds_up(*found):
                self._kind = found
                return found
        return "other"

    def _unit(self, place: int, tried: Tried) -> float:
        if isinstance(self._kind, Divided):
            return self._kind.unit
        return (self.tried or tried).unit(place)

    def _is_possible(self, place: int) -> bool:
        """Return whether a loss that was taken for a mean may be divided by a number."""
        if not self.takes_divisors:
            return False
        if isinstance(self._kind, Divided):
            return place == self._kind.place
        return self.tried is not None and place in self.tried.places()


def guess(divisors: list[float]) -> str:
    """Return what a loss may be over samples whose gradient is zero: "mean" or "sum".

    It may be counted so as long as its gradient stays zero in the window.

    Args:
        divisors: of it.
    """
    return "mean" if divisors else "sum"


def is_to_try(times: int) -> bool:
    """Return whether to try again what halves of one microbatch may show by chance.

    That is done with the first 8 microbatches, and then ever more rarely.

    Args:
        times: of the microbatch, from 1.
    """
    return times <= 8 or times & (times - 1) == 0


def _is_same(one: float, other: float, least: float = 0.0) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=least)
