"""Sums of gradients that grow while the backward pass runs, one variable after the other.

So the gradients of a microbatch are never there all at once beside the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ga_model.base import _numbers
from ga_model.base._internals import raw


class GradientSums:
    """The sums of a window, which a backward pass adds to.

    Args:
        totals: so far, one for each variable, or None.
        variables: those that are trained.
    """

    def __init__(self, totals: Sequence[Any] | None, variables: Sequence[Any]) -> None:
        self._tensors = list(map(raw, variables))
        self._totals: list[Any] = list(totals or [None for _ in variables])
        self._handles: list[Any] = []
        self._left = set(range(len(self._tensors)))  # places without a gradient so far
        self._shrink: Any = 1.0
        self._counts: Any = True

    def begin(self, shrink: Any, counts: Any) -> None:
        """Add the gradients that are taken from now on, instead of leaving them in `.grad`.

        Args:
            shrink: scalar, what the sums so far are to be multiplied by.
            counts: bool scalar, whether gradients are added, which may be NaN.
        """
        self._shrink, self._counts = shrink, counts
        for place, tensor in enumerate(self._tensors):
            hook = self._hook(place)
            self._handles.append(tensor.register_post_accumulate_grad_hook(hook))

    def end(self) -> list[Any]:
        """Return the sums, or None where no microbatch has had a gradient."""
        for handle in self._handles:
            handle.remove()
        for place in self._left if self._handles else ():
            if (total := self._totals[place]) is not None:
                total.mul_(_numbers.like(total, self._shrink))
        totals, self._totals = self._totals, []
        return totals

    def _hook(self, place: int) -> Any:
        def add(tensor: Any) -> None:
            gradient, tensor.grad = tensor.grad, None
            gradient = _widened(gradient)
            with torch.no_grad():
                self._totals[place] = self._sum(place, gradient)
            self._left.discard(place)

        return add

    def _sum(self, place: int, gradient: Any) -> Any:
        total = self._totals[place]
        if total is None:
            is_known = self._counts is True
            return gradient if is_known else _numbers.if_so(self._counts, gradient)
        shrink = self._shrink if place in self._left else 1.0
        return _numbers.added(total, gradient, shrink, self._counts)


def _widened(gradient: Any) -> Any:
    """Return a gradient in the dtype that it is summed in."""
    return gradient.to(getattr(torch, _numbers.sum_dtype(gradient.dtype)))
