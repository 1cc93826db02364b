"""Random numbers in a trial."""

from __future__ import annotations

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
