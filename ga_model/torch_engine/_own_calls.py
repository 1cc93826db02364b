"""Losses whose class has a `__call__` of its own.

One that gives what Keras reduces the loss to, times a number, averages over what Keras does. Of any
other the whole `__call__` is tried (`_probes.kind_of_loss`). Which it is, the numbers tell: those
of a microbatch and of its halves have to be in one ratio to what Keras makes of the same samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ga_model.base._internals import mask_of
from ga_model.hearing._compiled_copy import seeing
from ga_model.hearing._models import unrecorded
from ga_model.hearing._split import num_rows, part_of
from ga_model.torch_engine import _probes
from ga_model.torch_engine._divisors import is_to_try
from ga_model.torch_engine._not_known import otherwise

_TOLERANCE = 1e-4


class LossCall(NamedTuple):
    """A call of a loss, and what it gave.

    Attributes:
        loss: the loss.
        values: before Keras reduces them, or None: it does not.
        y_true, y_pred, sample_weight: as it was called with.
        computes_itself: whether `values` are what a `__call__` of its own returned, that averages
            over something else than Keras does.
    """

    loss: Any
    values: Any
    y_true: Any
    y_pred: Any
    sample_weight: Any
    computes_itself: bool = False

    def targets(self) -> Any:
        """Return what `compute` takes beside the predictions."""
        if not self.computes_itself:
            return self.y_true
        return (self.y_true,) if self.sample_weight is None else (self.y_true, self.sample_weight)

    def compute(self) -> Callable[[Any, Any], Any]:
        """Return the function that is tried: of targets and predictions."""
        if self.computes_itself:
            return lambda targets, y_pred: self.loss(targets[0], y_pred, *targets[1:])
        return self.loss.call  # type: ignore[no-any-return]

    def has_mask(self) -> bool:
        """Return whether its predictions are masked."""
        return mask_of(self.y_pred) is not None


class OwnCall:
    """What was found out of the `__call__` of one loss.

    Attributes:
        computes_itself: whether it gives another thing than what Keras reduces to, times a number.
        is_late: whether that was found after another microbatch was taken for such a product.
    """

    def __init__(self) -> None:
        self.computes_itself = self.is_late = False
        self._factor: float | None = None
        self._times = 0
        self._waiting: Any = None  # a sample that came alone

    def look(self, call: LossCall, value: Any, reduced: Any) -> bool:
        """Find out whether it computes itself, where that is due.

        Args:
            call: the call.
            value: what it returned.
            reduced: what Keras reduced the loss to in it, or None: it did not.
        """
        if self.computes_itself or value is reduced:
            return self.computes_itself
        known = self._factor
        if reduced is None:
            self.computes_itself = True
        elif (factor := _factor(value, reduced)) != 0.0:
            self._times += 1
            is_same = known is not None and factor is not None and _is_same([known, factor])
            if factor is None or not is_same or is_to_try(self._times):
                self.computes_itself = factor is None or not self._is_product(call, factor)
            self._factor = factor
        self.is_late = self.computes_itself and known is not None
        return self.computes_itself

    @otherwise(False)
    def _is_product(self, call: LossCall, factor: float) -> bool:
        """Return whether a call on the halves gives what Keras does, times the same number."""
        y_true, y_pred = _probes.detached(call.y_true), _probes.apart(_probes.detached(call.y_pred))
        if num_rows(y_pred) == 1:
            before, self._waiting = self._waiting or (y_true, y_pred), (y_true, y_pred)
            y_true, y_pred = (_probes.joined(*pair) for pair in zip(before, (y_true, y_pred)))
        rows = num_rows(y_pred)
        shares = [(0, rows), (0, rows // 2), (rows // 2, rows)]
        parts = [_factor_of(call.loss, part_of(y_true, *s), part_of(y_pred, *s)) for s in shares]
        if None in parts:
            return False
        return _is_same([factor, *(part for part in parts if part)])


def _factor_of(loss: Any, y_true: Any, y_pred: Any) -> float | None:
    """Return by what a loss multiplies what Keras reduces it to, as `_factor` does."""
    reduced: list[Any] = []
    with torch.no_grad(), unrecorded():
        value = seeing(loss, [], lambda number, weights: reduced.append(number))(y_true, y_pred)
    return _factor(value, reduced[-1]) if reduced else None


@otherwise(None)
def _factor(value: Any, reduced: Any) -> float | None:
    """Return by what a tensor was multiplied to give another one: None if by no number, and 0.0
    where nothing tells, as both are zero or not finite."""
    value, reduced = (torch.as_tensor(t).detach().double().cpu() for t in (value, reduced))
    if value.shape != reduced.shape:
        return None
    size = float(reduced.square().sum())
    if not size:
        return None if bool(value.any()) else 0.0
    factor = float((value * reduced).sum()) / size
    if not abs(factor) < float("inf"):
        return 0.0
    return factor if _probes.is_close(value, factor * reduced, _TOLERANCE) else None


def _is_same(factors: list[float]) -> bool:
    return max(factors) - min(factors) <= _TOLERANCE * max(map(abs, factors))
