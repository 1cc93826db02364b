"""Random numbers in a trial, and notes of the scalars that code divides by while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal


class Draws:
    """Gives each sample the same random numbers, at once with others and in a part of them.

    What is drawn once per batch is different in each part, or it would look exact.

    Args:
        rows: samples of the part that runs.
        total: samples of the trial.
        begin: scalar, where the part begins among them.
        run: scalar, a number for the part.
    """

    def __init__(self, rows: int, total: int, begin: Any, run: Any) -> None:
        self.rows = rows
        self.total = total
        self.begin = begin
        self.run = run
        self._num_draws = 0

    def next_seed(self) -> int:
        """Return the seed of the next draw, the same one in each part."""
        self._num_draws += 1
        return self._num_draws

    def kind_of(self, shape: tuple[int, ...]) -> Literal["by sample", "alike", "by batch"]:
        """Return whether draws of a shape are one or several per sample, or per batch."""
        if shape and shape[0] == self.rows:
            return "by sample"
        return "alike" if shape and shape[0] and shape[0] % self.rows == 0 else "by batch"


class Noted:
    """What a backend's `Noting` notes.

    Args:
        draws: what random numbers are drawn by, or None: as always.

    Attributes:
        scalars: those that were divided by, bounded or decided by, by names, which are the same for
            other numbers of samples. These have the place in the code, numbered in their order, and
            how often it was passed before.
        of_shapes: names of those that follow from shapes alone, if known.
        dtypes: names of the dtypes that were computed in, if known.
    """

    def __init__(self, draws: Draws | None) -> None:
        self.scalars: dict[str, Any] = {}
        self.of_shapes: set[str] = set()
        self.dtypes: set[str] = set()
        self._draws = draws
        self._passed: dict[Any, tuple[int, int]] = {}  # places, their numbers, how often

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a function, and note its operations."""
        raise NotImplementedError

    def note(self, operation: str, value: Any, is_of_shapes: bool = False) -> None:
        """Note a scalar of an operation."""
        place = self._place() or len(self._passed)
        number, times = self._passed.get(place, (len(self._passed), 0))
        self._passed[place] = number, times + 1
        name = f"{number:05}.{times:05} {operation}"
        self.scalars[name] = value
        if is_of_shapes:
            self.of_shapes.add(name)

    def _place(self) -> Any:
        """Return the place in the code that runs now, or None: each operation has its own."""
        frame: FrameType | None = sys._getframe(2)
        found = []
        while frame is not None:
            found.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return tuple(found)


def site_of(name: str) -> str:
    """Return the same of all scalars of one place, which a loop over time steps passes again."""
    return f"{name[:5]} {name[12:]}"
