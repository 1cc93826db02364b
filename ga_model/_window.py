"""The open window of a model: its counter, and an accumulator per optimizer."""

from __future__ import annotations

import math
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
    """

    def __init__(self, accumulation_steps: int, run_eagerly: bool) -> None:
        _strategy.check_single_replica()
        self._next_steps = _strategy.make_variable((), tf.int64)
        self.steps = _strategy.make_variable((), tf.int64)
        self._num_microbatches = _strategy.make_variable((), tf.int64)
        self._accumulators: dict[int, tuple[Any, GradientAccumulator]] = {}
        self._run_eagerly = run_eagerly
        self._update_if = self._make_update()
        with tf.init_scope():
            self.set_steps(accumulation_steps)

    def set_steps(self, accumulation_steps: int) -> None:
        """Let the next window have `accumulation_steps` microbatches."""
        self._next_steps.assign(accumulation_steps)

    def begin_microbatch(self) -> tf.Tensor:
        """Return whether a microbatch opens the window (bool scalar), and fix the size if so."""
        is_first = tf.equal(self._num_microbatches, 0)
        self.steps.assign(tf.where(is_first, self._next_steps, self.steps))
        return is_first

    def headroom(self) -> tf.Tensor:
        """Return a power of two near 1 / steps (float64 scalar).

        Folded into the losses it keeps float16 gradients about in the range that they have in the
        whole batch, where a row counts that much less. A power of two is exact, and it cancels in
        the mean.
        """
        doublings = tf.math.log(tf.cast(self.steps, tf.float64)) / math.log(2.0)
        return tf.pow(tf.constant(2.0, tf.float64), -tf.math.ceil(doublings))

    def accumulator(self, optimizer: Any) -> GradientAccumulator:
        """Return the optimizer's accumulator, made on first use."""
        if id(optimizer) not in self._accumulators:
            self._accumulators[id(optimizer)] = (optimizer, GradientAccumulator())
            self._update_if = self._make_update()  # one traced before would leave it out
        return self._accumulators[id(optimizer)][1]

    def add(self, target: Target, contribution: Contribution) -> None:
        """Add what a step had for one optimizer."""
        gradients, weight, relative_weight = contribution
        accumulator = self.accumulator(target.optimizer)
        accumulator.add(
            gradients, target.variables, weight=weight, _relative_weight=relative_weight
        )

    def end_microbatch(self) -> None:
        """Count the microbatch, and update if it fills the window."""
        self._num_microbatches.assign_add(1)
        self._update(tf.greater_equal(self._num_microbatches, self.steps))

    def _update(self, condition: Any) -> None:
        for optimizer, accumulator in self._accumulators.values():
            if accumulator.variables:
                accumulator.apply(optimizer, _condition=condition)
        count = self._num_microbatches
        count.assign(tf.where(condition, tf.zeros_like(count), count))

    def _make_update(self) -> Any:
        return self._update if self._run_eagerly else tf.function(self._update)

    def is_open(self) -> bool:
        """Return whether there are microbatches that no update has used yet."""
        with tf.init_scope():  # read the value now, also while a graph is traced
            return bool(self._num_microbatches.numpy())

    def close(self) -> None:
        """Make the update of a partial window. An empty one changes nothing."""
        if not tf.executing_eagerly():
            self._update(tf.greater(self._num_microbatches, 0))
        elif self.is_open():
            self._update_if(True)

    def discard(self) -> None:
        """Forget a partial window, also one whose first microbatch was interrupted."""
        for _, accumulator in self._accumulators.values():
            accumulator.reset()
        self._num_microbatches.assign(0)
