"""Find out whether a step leaves its gradients to the next batch, where PyTorch adds to them.

Plain Keras then updates with gradients of earlier batches, too, but a window begins each batch
without any. Whether anything clears gradients is asked once: after the first update, weights keep
theirs until the next batch, as a callback may clear them. The step of that batch then begins with
gradients that are zeros. Those that are still there when it takes the only gradient, and that it
updates with, it does not clear either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ga_model.base._identity import is_in
from ga_model.base._internals import raw
from ga_model.base._internals_torch import times_written

_MOST = 2**16  # entries of a weight that gets zeros, if there is one so small


class LeftGradients:
    """What was found out of the gradients that steps of one compiled model leave.

    Attributes:
        is_known: whether there is nothing more to find out.
    """

    def __init__(self) -> None:
        self.is_known = False
        # Small ones of the variables to which the first update left gradients, and these.
        self._left: list[tuple[Any, Any]] = []
        self._zeros: list[tuple[Any, Any]] = []
        self._is_waiting = False  # whether variables have them between batches
        self._kept: list[Any] = []  # variables whose zeros are there when a gradient is taken
        self._num_taken = 0

    def forget(self) -> None:
        """Note that gradients are cleared between steps."""
        self.is_known = True

    def end_batch(self) -> None:
        """Leave gradients until the next batch, if its step is the one to be looked at."""
        if self._left and not self.is_known:
            self._is_waiting = True
            for variable, gradient in self._left:
                raw(variable).grad = gradient

    def begin_batch(self) -> None:
        """Note whether gradients were cleared since."""
        if self._is_waiting:
            there = [raw(variable).grad for variable, _ in self._left]
            self.is_known |= not all(map(_is_left, there))
            self.release()

    def release(self) -> None:
        """Leave no gradients until the next batch."""
        if self._is_waiting:
            self._is_waiting = False
            for variable, _ in self._left:
                raw(variable).grad = None

    def begin_step(self) -> None:
        """Give weights zeros, if the next step is the one to be looked at."""
        self._zeros = [(v, torch.zeros_like(raw(v))) for v, _ in self._left]
        for variable, zeros in self._zeros:
            raw(variable).grad = zeros

    def note_backward(self) -> None:
        """Note that the step is about to add gradients to those that there are."""
        self._num_taken += 1
        if self._num_taken == 1:
            there = [pair for pair in self._zeros if raw(pair[0]).grad is pair[1]]
            self._kept = [v for v, zeros in there if not times_written(zeros)]
            for variable, _ in there:
                raw(variable).grad = None

    def end_step(self, updated: Iterable[Any], is_update: bool) -> bool:
        """Note that a step is through.

        Args:
            updated: the variables that it updates.
            is_update: whether it is the last of a window.

        Returns:
            Whether it added gradients to those that an earlier one left.
        """
        left = [v for v in updated if _is_left(raw(v).grad)]
        if self._zeros:
            is_added = self._num_taken == 1 and any(is_in(v, left) for v in self._kept)
            self.is_known, self._zeros, self._kept = True, [], []
            return is_added
        self._num_taken = 0
        if is_update:
            least = min((raw(v).numel() for v in left), default=0)
            small = [v for v in left if raw(v).numel() <= max(least, _MOST)]
            self.is_known = not left
            self._left = [(v, raw(v).grad.detach().clone()) for v in small]
        return False


def _is_left(gradient: Any) -> bool:
    return gradient is not None and bool(gradient.any())
