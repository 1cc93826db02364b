"""The open window of a model: its count, and a sum of gradients for each optimizer."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ga_model.torch_engine._part import Part
from ga_model.torch_engine._torch_statistics import Statistics

if TYPE_CHECKING:
    from ga_model.torch_engine._process_group import Processes


class _Sums(NamedTuple):
    """What a window has before a batch: its attributes of these names."""

    steps: int
    num_batches: int
    parts: list[Part]
    total: float
    unit: float
    has_counted: bool
    has_lost: bool
    statistics: Statistics
    logs: dict[Hashable, Any]
    written: dict[int, Any]


class Window:
    """Collects batches and makes one update of each optimizer when it is full.

    Args:
        model: the `AccumulatingModel`, as it is compiled.
        steps: batches that fill it.
        processes: those that train the model together, or None where this one trains it alone.
        is_trial: whether it makes no updates.

    Attributes:
        is_trial: as it is passed.
        processes: as it is passed.
        steps: batches that fill the open window, or the next one.
        unit: what weights are counted in: the first one times a power of two near the number of
            microbatches. It grows by powers of two where a heavier one comes. 0.0 before the first.
        has_counted: whether a microbatch of the window has counted.
        has_lost: whether one had a term that was made zero because it was divided by zero.
        parts: the sums, one for each optimizer.
        total: the sum of the weights, in `unit`.
        statistics: of BatchNormalization layers.
        logs: what logged numbers have come to, as `BatchLogs` has them.
        guesses: what losses were taken for whose microbatches did not tell, by their name.
        written: values that steps have given to variables of optimizers, by their id.
    """

    def __init__(
        self, model: Any, steps: int, processes: Processes | None = None, is_trial: bool = False
    ) -> None:
        self._model = model
        self.is_trial = is_trial
        self._earlier: _Sums | None = None
        self.processes = processes
        self._next_steps = self.steps = steps
        self.parts: list[Part] = []
        self._begin()

    def _begin(self) -> None:
        self.steps = self._next_steps
        self._num_batches = 0
        self.total = self.unit = 0.0
        self.has_counted = self.has_lost = False
        self.parts = []
        self.statistics = Statistics()
        self.logs: dict[Hashable, Any] = {}
        self.written: dict[int, Any] = {}
        self.guesses: dict[str, Any] = {}

    def set_steps(self, accumulation_steps: int) -> None:
        """Let the next window have `accumulation_steps` batches."""
        self._next_steps = accumulation_steps
        if not self.is_open():
            self.steps = accumulation_steps

    def relative_weight(self, weight: float | None, parts: float) -> float:
        """Return a microbatch's weight in the window's unit, which grows if it has to.

        Args:
            weight: the weight, or None where the loss is a sum.
            parts: a power of two near the number of microbatches.
        """
        if weight is None:
            return 1.0
        least = weight * parts
        if self.unit == 0.0:
            self.unit = least
        elif abs(least) > abs(self.unit):
            growth = 2.0 ** math.ceil(math.log2(abs(least / self.unit)))
            self.unit *= growth
            self.total /= growth
            for part in self.parts:
                part.scale(1.0 / growth)
        return weight / self.unit if self.unit else 0.0

    def put_back(self) -> None:
        """Let the gradients of variables be the sums, for a microbatch that adds to them."""
        for part in self.parts:
            part.put_back()

    def add(self, parts: list[Part], relative_weight: float | None, is_added: bool = False) -> None:
        """Add what a microbatch gave.

        Args:
            parts: one for each optimizer.
            relative_weight: its weight in the window's unit, or None where the loss is a sum.
            is_added: whether the parts have what was put back, and are the sums therefore.
        """
        self.has_counted = True
        self.total += relative_weight or 0.0
        if is_added:
            self.parts = [part for part in self.parts if part.is_left_out]
        self.add_parts(parts)

    def add_parts(self, parts: list[Part]) -> None:
        """Add gradients to the sums."""
        for part in parts:
            same = [p for p in self.parts if p.optimizer is part.optimizer]
            if same:
                same[0].add(part)
            else:
                self.parts.append(part)

    def begin_batch(self) -> None:
        """Keep what there is apart from the next batch, which may fail."""
        self._earlier = _Sums(
            self.steps,
            self._num_batches,
            self.parts,
            self.total,
            self.unit,
            self.has_counted,
            self.has_lost,
            self.statistics.copy(),
            dict(self.logs),
            dict(self.written),
        )
        self.parts = []

    def take_back(self) -> None:
        """Forget the batch that `begin_batch` has begun."""
        if (earlier := self._earlier) is not None:
            self.steps, self._num_batches, self.parts, self.total, *_ = earlier
            self.unit, self.has_counted = earlier.unit, earlier.has_counted
            self.has_lost = earlier.has_lost
            self.statistics, self.logs = earlier.statistics, earlier.logs
            self.written, self._earlier = earlier.written, None

    def _join(self) -> None:
        """Put together what there was before the batch, and what it gave."""
        if (earlier := self._earlier) is not None:
            of_batch, self.parts, self._earlier = self.parts, earlier.parts, None
            for part in self.parts:
                part.scale(earlier.unit / self.unit if self.unit else 1.0)
            self.add_parts(of_batch)

    def end_batch(self) -> None:
        """Count the batch, and update if it fills the window."""
        self._join()
        self._num_batches += 1
        if self._num_batches >= self.steps:
            self._update(is_end=False)

    def is_open(self) -> bool:
        """Return whether there are batches that no update has used yet."""
        return self._num_batches > 0

    def num_batches(self) -> int:
        """Return how many batches there are that no update has used yet."""
        return self._num_batches

    def close(self) -> None:
        """Make the update of a full or partial window. An empty one changes nothing.

        Of several processes, one that has no batches left takes part in the updates of the others
        until none has.
        """
        while not self._update(is_end=True):
            pass

    def _update(self, is_end: bool) -> bool:
        """Make the update of what there is.

        Args:
            is_end: whether this process has no batches left.

        Returns:
            Whether no process has.
        """
        parts, total, has_counted = self.parts, self.total, self.has_counted
        unit, statistics, has_lost = self.unit, self.statistics, self.has_lost
        self._begin()
        noise = None if self._model is None else self._model._accumulation.measured_noise
        if self.processes is not None:
            is_measured = noise is not None
            sums = self.processes.sum(parts, total, unit, has_counted, is_end, is_measured)
            parts, total, unit, has_counted, is_end = sums
        if has_counted:
            for part in parts:
                if noise is not None:
                    part.measured(noise, total, unit)
                # Without any weight gradients are zero, as plain Keras's.
                part.update(1.0 if total == 0.0 else total)
            if has_lost and total != 0.0:
                self._model._accumulation.count_lost()
            statistics.move()
            run_on_update(self._model)
        return is_end

    def discard(self) -> None:
        """Forget a partial window."""
        self._begin()

    def messages(self, model: str) -> list[str]:
        """Return the warnings about the windows so far: none."""
        return []


def run_on_update(model: Any) -> None:
    """Run what a model does once per update, if it does anything."""
    if model._on_update is not None:
        with torch.no_grad():
            model._on_update()
