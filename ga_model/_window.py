"""The open window of a model: its counter, and an accumulator per optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from ga_model import _strategy
from ga_model._accumulator import GradientAccumulator


class Target(NamedTuple):
    """One optimizer that a step applied, and the variables it was to update."""

    optimizer: Any
    variables: list[Any]


class Contribution(NamedTuple):
    """What a step adds to one optimizer's window.

    Attributes:
        gradients: one per variable, a tensor, `tf.IndexedSlices` or None.
        weight: scalar tensor, or None where the window is a plain sum.
        relative_weight: `weight` in the window's unit where the gradients carry it already, because
            it was folded into the loss; else None.
    """

    gradients: list[Any]
    weight: Any | None
    relative_weight: Any | None


class Window:
    """Collects microbatches and makes one update of each optimizer when it is full.

    The state is in variables, so one traced function serves every position in the window and every
    value of `accumulation_steps`.

    Args:
        accumulation_steps: microbatches per window.
        run_eagerly: whether `close` runs without `tf.function`.

    Attributes:
        steps: int64 scalar variable, the size of the open window.
        headroom: float64 scalar variable, a power of two, about 1 / steps. Folded into the losses
            of a window it keeps float16 gradients within the range they have in the whole batch,
            where a row counts that much less. A power of two is exact and cancels in the mean.
        is_first: bool scalar tensor, whether the microbatch that is under way opened the window.
    """

    def __init__(self, accumulation_steps: int, run_eagerly: bool) -> None:
        _strategy.check_single_replica()
        self._next_steps = _strategy.make_variable((), tf.int64)
        self._next_headroom = _strategy.make_variable((), tf.float64)
        self.steps = _strategy.make_variable((), tf.int64)
        self.headroom = _strategy.make_variable((), tf.float64)
        self._num_microbatches = _strategy.make_variable((), tf.int64)
        self.is_first: Any = True
        self._accumulators: dict[int, tuple[Any, GradientAccumulator]] = {}
        self._update = self._update_if if run_eagerly else tf.function(self._update_if)
        with tf.init_scope():
            self.set_steps(accumulation_steps)

    def set_steps(self, accumulation_steps: int) -> None:
        """Let the next window have `accumulation_steps` microbatches."""
        self._next_steps.assign(accumulation_steps)
        self._next_headroom.assign(2.0 ** -(accumulation_steps - 1).bit_length())

    def begin_microbatch(self) -> None:
        """Note in `is_first` whether a microbatch opens the window, and fix the size if so."""
        self.is_first = tf.equal(self._num_microbatches, 0)
        self.steps.assign(tf.where(self.is_first, self._next_steps, self.steps))
        self.headroom.assign(tf.where(self.is_first, self._next_headroom, self.headroom))

    def accumulator(self, optimizer: Any) -> GradientAccumulator:
        """Return the optimizer's accumulator, made on first use."""
        if id(optimizer) not in self._accumulators:
            self._accumulators[id(optimizer)] = (optimizer, GradientAccumulator())
        return self._accumulators[id(optimizer)][1]

    def add(self, target: Target, contribution: Contribution) -> None:
        """Add what a step had for one optimizer."""
        gradients, weight, relative_weight = contribution
        accumulator = self.accumulator(target.optimizer)
        if weight is not None and relative_weight is None:
            accumulator.add(gradients, target.variables, weight=weight)
        else:
            accumulator.add_weighted(
                gradients, target.variables, weight=weight, relative_weight=relative_weight
            )

    def end_microbatch(self) -> None:
        """Count the microbatch, and update if it fills the window."""
        self._num_microbatches.assign_add(1)
        self._update_if(tf.greater_equal(self._num_microbatches, self.steps))

    def _update_if(self, condition: Any) -> None:
        for optimizer, accumulator in self._accumulators.values():
            if accumulator.variables:
                accumulator.apply_if(condition, optimizer)
        self._num_microbatches.assign(
            tf.where(condition, tf.zeros_like(self._num_microbatches), self._num_microbatches)
        )

    def is_open(self) -> bool:
        """Return whether there are microbatches that no update has used yet."""
        with tf.init_scope():  # read the value now, also while a graph is traced
            return bool(self._num_microbatches.numpy())

    def close(self) -> None:
        """Make the update of a partial window. An empty one changes nothing."""
        if self.is_open():
            self._update(True)

    def discard(self) -> None:
        """Forget a partial window."""
        if self.is_open():
            for _, accumulator in self._accumulators.values():
                accumulator.reset()
            self._num_microbatches.assign(0)
