"""Control random numbers in a trial, and record the scalars that running code divides by."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Literal

from ga_model.base._types import Nest, Scalar


class Draws:
    """Gives each sample the same random numbers, whichever samples run with it.

    Draws that are one per batch differ between parts. Otherwise they would look exact.

    Args:
        rows: number of samples of the part that runs.
        total: number of samples of the trial.
        begin: index of the part's first sample.
        run: number of the part's run, for draws per batch.
    """

    def __init__(self, rows: int, total: int, begin: Scalar, run: Scalar) -> None:
        self.rows = rows
        self.total = total
        self.begin = begin
        self.run = run
        self._num_draws = 0

    def next_seed(self) -> int:
        """Return the seed of the next draw, the same in each part."""
        self._num_draws += 1
        return self._num_draws

    def kind_of(self, shape: tuple[int, ...]) -> Literal["by sample", "alike", "by batch"]:
        """Return whether a draw has one row per sample, several ("alike"), or is per batch."""
        if shape and shape[0] == self.rows:
            return "by sample"
        return "alike" if shape and shape[0] and shape[0] % self.rows == 0 else "by batch"


class Noted:
    """Record of the scalars that code divides by: the base of each backend's `Noting`.

    Args:
        draws: source of random numbers, or None to leave them as they are.

    Attributes:
        scalars: scalars that the code divides by, bounds or branches on. Their names are the same
            for any number of samples: the number of the place in the code, and how often the code
            passed it before.
        of_shapes: names of those that follow from shapes alone, if known.
        unwatched: names of these, and of those that training cannot compare with the trial.
        dtypes: dtypes of results, if known.
    """

    def __init__(self, draws: Draws | None) -> None:
        self.scalars: dict[str, Scalar] = {}
        self.of_shapes: set[str] = set()
        self.unwatched: set[str] = set()
        self.dtypes: set[object] = set()
        self._draws = draws
        # Number and count of passes of each place.
        self._passed: dict[Hashable, tuple[int, int]] = {}

    def run(self, function: Callable[..., Nest], arguments: tuple[Nest, ...]) -> Nest:
        """Run a function, and record the scalars of its operations."""
        raise NotImplementedError

    def note(
        self, operation: str, value: Scalar, is_of_shapes: bool = False, is_watched: bool = True
    ) -> None:
        """Record a scalar of an operation."""
        place = self._place() or len(self._passed)
        number, times = self._passed.get(place, (len(self._passed), 0))
        self._passed[place] = number, times + 1
        name = f"{number:05}.{times:05} {operation}"
        self.scalars[name] = value
        if is_of_shapes:
            self.of_shapes.add(name)
        if is_of_shapes or not is_watched:
            self.unwatched.add(name)

    def _place(self) -> Hashable | None:
        """Return a key for the place in the code that runs, or None to number each operation."""
        frame: FrameType | None = sys._getframe(2)
        frames = []
        while frame is not None:
            frames.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return tuple(frames)


def site_of(name: str) -> str:
    """Return a name without its count of passes, such as those of a loop over time steps."""
    return f"{name[:5]} {name[12:]}"


def may_bound(names: tuple[str, ...]) -> bool:
    """Return whether scalars may be the arguments and the result of one bounding operation."""
    operations = {name[12:].lower() for name in names}
    parts = ("max", "clamp", "where", "select")  # of its name, on any backend
    return len(operations) == 1 and any(part in name for name in operations for part in parts)
