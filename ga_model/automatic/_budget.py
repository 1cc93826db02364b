"""Predict whether a microbatch fits in memory, from those that were tried before it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from ga_model.tools import _memory

_MARGIN = 0.1  # of the available memory, which is left alone
_SMALL = 0.02  # of it, which is not looked at


class Budget:
    """Predicts whether a size fits in the memory of a CPU, from the sizes before it.

    The peak of resident memory grows with the rows. A straight line through the peaks measured so
    far gives that of the next size, which is at most twice the last.

    Args:
        is_on_cpu: whether the model is. Elsewhere, and where nothing tells of memory, everything
            is allowed.
        least: bytes of what the first size takes that do not grow with the rows: the sums.
    """

    def __init__(self, is_on_cpu: bool, least: int) -> None:
        self._is_used = is_on_cpu and _memory.peak_memory() is not None
        self._least = least
        self._rises: dict[int, int] = {}
        self._start: int | None = None
        self._held = 0  # freed memory that the process had kept, and that trials take first
        self._available: dict[int, float] = {}  # before the trial of a size
        self.has_begun = False

    def allows(self, size: int) -> bool:
        """Return whether a size is predicted to leave some of the available memory."""
        if not self._is_used or not self._rises:
            return True
        available = _memory.available_memory() * (1 - _MARGIN)
        taken = _memory.resident_memory() - (self._start or 0)  # and kept for the next trial
        self._available[size] = available + taken
        return bool(self._predicted(size) <= available + taken)

    def allowed(self, size: int) -> bool:
        """Return whether a size that was tried took no more than `allows` had counted on."""
        return bool(self._rises.get(size, 0) <= self._available.get(size, math.inf))

    def _predicted(self, size: int) -> Any:
        sizes = sorted(self._rises)
        last, rise = sizes[-1], float(self._rises[sizes[-1]])
        if len(sizes) == 1:
            return rise + max(0.0, rise - self._least) * (size - last) / last
        if self._held > _SMALL * self._available.get(size, math.inf):
            # Rises are what is left above the held memory, and say little of slopes.
            taken = max(0.0, self._held + rise - self._least)
            return rise + taken * (size - last) / last
        slopes: list[float] = [(rise - self._rises[s]) / (last - s) for s in (sizes[0], sizes[-2])]
        return rise + max([0.0, *slopes]) * (size - last)

    @contextlib.contextmanager
    def measuring(self, size: int) -> Iterator[None]:
        """Note the peak of what runs inside as that of a size."""
        if not self._is_used:
            yield
            return
        if self._start is None and self.has_begun:
            self._start, self._held = _memory.resident_memory(), _memory.held_memory()
        _memory.reset_peak_memory()
        yield
        if self._start is not None:
            self._rises[size] = (_memory.peak_memory() or 0) - self._start
        self.has_begun = True
