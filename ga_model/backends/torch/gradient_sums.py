"""Add each gradient to its sum during the backward pass.

So the gradients of a microbatch are never all in memory at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import keras
import torch

from ga_model.base import _numbers
from ga_model.base._internals import raw
from ga_model.base._internals_torch import has_hooks_on_sum
from ga_model.base._types import Scalar


class GradientSums:
    """The window's sums of gradients, which a backward pass adds to.

    With `is_in_grad`, they are in `.grad` until `end`.
    """

    def __init__(
        self, totals: Sequence[torch.Tensor | None] | None, variables: Sequence[keras.Variable]
    ) -> None:
        self._tensors = list(map(raw, variables))
        self._totals: list[torch.Tensor | None] = list(totals or [None for _ in variables])
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._counts: Scalar = True
        self.is_in_grad = False

    def begin(self, shrink: Scalar, counts: Scalar) -> None:
        """Add gradients to the sums from now on, instead of leaving them in `.grad`."""
        self._counts = counts
        if torch.is_tensor(shrink) or shrink != 1.0:  # it is one if gradients do not count
            with torch.no_grad():
                for total in self._totals:
                    if total is not None:
                        total.mul_(_numbers.like(total, shrink))
        self.is_in_grad = self._can_stay()
        for place, (tensor, total) in enumerate(zip(self._tensors, self._totals)):
            if self.is_in_grad:
                tensor.grad = total
            else:
                add = functools.partial(self._add, place)
                self._handles.append(tensor.register_post_accumulate_grad_hook(add))

    def end(self) -> list[torch.Tensor | None]:
        """Return the sums, None for variables without a gradient in all microbatches."""
        if self.is_in_grad:
            self._totals = [tensor.grad for tensor in self._tensors]
            for tensor in self._tensors:
                tensor.grad = None
        for handle in self._handles:
            handle.remove()
        totals, self._totals = self._totals, []
        return totals

    def _can_stay(self) -> bool:
        """Return whether PyTorch may add gradients to the sums in `.grad`, as in a loop by hand.

        It may not if user hooks would see the sum instead of a gradient.
        """
        return self._counts is True and all(
            tensor.dtype in (torch.float32, torch.float64) and not has_hooks_on_sum(tensor)
            for tensor in self._tensors
        )

    def _add(self, place: int, tensor: torch.Tensor) -> None:
        """Move a gradient from `.grad` to its sum."""
        gradient, tensor.grad = tensor.grad, None
        with torch.no_grad():
            wide, total = _numbers.widened(gradient), self._totals[place]
            if total is not None:
                wide = _numbers.added(total, wide, 1.0, self._counts)
            elif self._counts is not True:
                wide = _numbers.where_or_zero(self._counts, wide)
            self._totals[place] = wide
