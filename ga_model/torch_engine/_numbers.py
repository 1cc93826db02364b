"""What one number of metrics or logs is over samples, as far as trials tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ga_model.torch_engine._divisors import Divided, Tried, divisors_of

_LEAST = 1e-7  # what differs less is rounding


class Shares(NamedTuple):
    """The samples of a trial: a microbatch, and its halves.

    Attributes:
        rows, half: samples of the microbatch, and of its first half.
        weights: what the loss weighs of the three, None where it is a sum.
        tolerance: relative difference of numbers that are the same.
    """

    rows: int
    half: int
    weights: Sequence[float | None]
    tolerance: float

    def factors(self, kind: Any, tried: Tried) -> list[float] | None:
        """Return what the numbers of halves are multiplied with to come to that of the whole.

        Args:
            kind: "mean", "sum", "loss": divided as the loss is, or `Divided`.
            tried: the divisors of the three numbers.
        """
        if kind == "sum":
            return [1.0, 1.0]
        if kind == "mean":
            return [self.half / self.rows, 1.0 - self.half / self.rows]
        if kind == "loss":
            whole, *halves = self.weights
            if not whole or None in halves:
                return None
            return [float(weight or 0.0) / whole for weight in halves]
        return tried.factors(kind.place) if kind.place in tried.places() else None


class Number:
    """A number, and what it may be over samples: all that has fit so far.

    Attributes:
        kinds: "last": no samples change it; or as `Shares.factors` takes them. None as long as
            nothing was tried, and none if it is something else.
    """

    def __init__(self) -> None:
        self.kinds: list[Any] | None = None
        self._least = 0.0  # of its divisor
        self._last: Any = None  # its value, where no samples change it
        self._is_loss: bool | None = None

    @property
    def kind(self) -> Any:
        """The first kind that fits, or None."""
        return self.kinds[0] if self.kinds else None

    @property
    def kind_of_sum(self) -> Any:
        """What it is put together as, should it turn out that samples change it."""
        return next((kind for kind in self.kinds or () if kind != "last"), None)

    def is_loss(self, is_equal: bool, is_zero: bool) -> bool:
        """Return whether it is the value of a loss, as it has been so far where both are zero."""
        if not (is_equal and is_zero):
            self._is_loss = is_equal and self._is_loss is not False
        return self._is_loss is not False

    def is_to_try(self, value: Any, is_first: bool) -> bool:
        """Return whether it may be another kind from some value on.

        Samples change what differs within a window; and a divisor may be as `max(number, 1)` is.

        Args:
            value: of a microbatch.
            is_first: whether that is the first one of its window.
        """
        if self.kind == "last":
            before, self._last = self._last, value
            if is_first or before is None or bool((torch.as_tensor(value == before)).all()):
                return False
            self.kinds = (self.kinds or [])[1:]
            return True
        if not isinstance(self.kind, Divided):
            return False
        weight = self.kind.weight(divisors_of_number(value))
        return weight is None or 0.0 < weight < self._least

    def note(self, values: Sequence[Any], shares: Shares, is_random: bool = False) -> bool:
        """Note a trial, and return whether the number is of some kind.

        Args:
            values: the number of a microbatch, and of its halves.
            shares: their samples.
            is_random: whether it is another one each time. Then the kind that fits best is taken.
        """
        numbers = [torch.as_tensor(value).detach().cpu().double() for value in values]
        if any(number.shape != numbers[0].shape for number in numbers):
            return True
        size = max(float(number.abs().max()) if number.numel() else 0.0 for number in numbers)
        if not 0.0 < size < float("inf"):
            return True  # it tells nothing
        tried = _tried(values, shares.rows)
        kinds = self.kinds
        if kinds is None:
            kinds = ["last"] if not torch.is_tensor(values[0]) or is_integer(values[0]) else []
            kinds += [Divided(place, 1.0) for place in tried.places()]  # by rows, perhaps
            kinds += ["sum"] if is_integer(values[0]) else ["mean", "loss", "sum"]
        errors = {kind: _error(kind, numbers, shares, tried) for kind in kinds}
        least = min(errors.values(), default=0.0) if is_random else shares.tolerance * size + _LEAST
        self.kinds = [kind for kind, error in errors.items() if error <= least]
        if isinstance(self.kind, Divided):
            divisors = tried.whole, tried.first, tried.second
            found = [numbers[self.kind.place] for numbers in divisors]
            self._least = min((divisor for divisor in found if divisor), default=0.0)
        return bool(self.kinds)


def is_integer(value: Any) -> bool:
    """Return whether a number is an integer, or a tensor of some."""
    if torch.is_tensor(value):
        return not value.is_floating_point()
    if isinstance(value, (np.generic, np.ndarray)):
        return np.issubdtype(value.dtype, np.integer)
    return isinstance(value, int)


def _error(kind: Any, numbers: list[Any], shares: Shares, tried: Tried) -> float:
    """Return how much a number differs from what it is if it is of a kind."""
    whole, first, second = numbers
    if kind == "last":
        return 0.0 if torch.equal(whole, first) and torch.equal(whole, second) else float("inf")
    factors = shares.factors(kind, tried)
    if factors is None:
        return float("inf")
    parts = [part * factor for part, factor in zip((first, second), factors) if factor]
    error = float((whole - sum(parts)).abs().max())
    return error if error == error else float("inf")


def _tried(values: Sequence[Any], rows: int) -> Tried:
    whole, first, second = map(divisors_of_number, values)
    return Tried(whole, first, second, rows)


def divisors_of_number(value: Any) -> list[float]:
    """Return the numbers by which a number is divided, as far as PyTorch's autograd has them.

    A sum of nothing is divided by nothing, and by no `max(number, 1)`.
    """
    if getattr(value, "grad_fn", None) is None:
        return []
    is_empty = not bool(value.detach().any())
    return [0.0 if is_empty and found <= 1.0 else found for found in divisors_of(value)]
