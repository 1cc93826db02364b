"""The open window of a model: its counter, and a sum per optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from ga_model.base import _messages
from ga_model.base._context import ThreadValue
from ga_model.base._numbers import power_of_two
from ga_model.batch._window_logs import WindowLogs
from ga_model.batch._window_statistics import WindowStatistics
from ga_model.recording._normalization import Call
from ga_model.recording._recorder import Target
from ga_model.replicas import _strategy
from ga_model.sums._moments import Moments
from ga_model.sums._noise import GradientNoise
from ga_model.sums._sums import GradientSum
from ga_model.sums._window_sum import WindowSum

# Whether the batch that is trained fills its window, where that is known before its graph runs.
# None leaves it to the graph.
fills_window = ThreadValue()


class Counter:
    """A count in a variable that Keras and TensorFlow do not track as the model's."""

    def __init__(self) -> None:
        self._count = _strategy.make_variables(lambda: tf.zeros((), tf.int64))

    def add(self, number: Any) -> None:
        """Add an int64 scalar tensor."""
        self._count.assign_add(number)

    def __int__(self) -> int:
        return sum(int(count.numpy()) for count in _strategy.copies(self._count))


class Window:
    """Collects batches and makes one update of each optimizer when it is full.

    The state is in variables, so a traced function serves every value of `accumulation_steps`, and
    every position in the window. Where `fills_window` tells whether it is the last one, what is
    traced is for the last one or for all others, without a condition.

    Args:
        model: the `AccumulatingModel`, as it is compiled.

    Attributes:
        steps: int64 scalar variable, the size of the open window, or of the next one.
        parts: float64 scalar variable, the power of two at or above it.
        logs: the logged numbers of the open window.
    """

    def __init__(self, model: Any) -> None:
        self._next_known = model.accumulation_steps  # what `_next_steps` has
        # What `_remaining` has, where only calls that `count_batch` is told of move it; else None.
        self._known: int | None = None
        self._is_moved_by_graphs = False
        self._next_steps, self.steps, self._remaining = _strategy.make_variables(
            lambda: [tf.constant(model.accumulation_steps, tf.int64) for _ in range(3)]
        )
        self.parts = _strategy.make_variables(lambda: power_of_two(model.accumulation_steps))
        self._is_uneven = _strategy.make_variables(lambda: tf.constant(False))
        # Of the window's first batch, the numbers of samples of its parts.
        self._rows: dict[tuple[int, ...], list[Any]] = {}
        self._sums: dict[int, tuple[Any, WindowSum]] = {}
        self._statistics = WindowStatistics()
        self.logs = WindowLogs()
        self._run_eagerly = model.run_eagerly
        self._jit_compile = bool(model.jit_compile)
        self._on_update = model._on_update
        self._update_if = self._make_update()

    def set_steps(self, accumulation_steps: int) -> None:
        """Let the next window have `accumulation_steps` batches."""
        if accumulation_steps == self._next_known:
            return
        self._next_known = accumulation_steps
        self._next_steps.assign(accumulation_steps)
        if not self.is_open():
            self._begin()

    def _begin(self) -> None:
        self._known = None
        steps = self._next_steps.read_value()
        self.steps.assign(steps)
        self._remaining.assign(steps)
        self.parts.assign(power_of_two(steps))
        self.logs.reset()
        for kept in itertools.chain(*self._rows.values()):
            kept.assign(tf.zeros_like(kept))

    def _sum_of(self, optimizer: Any) -> WindowSum:
        """Return the optimizer's sum, made on first use."""
        if id(optimizer) not in self._sums:
            self._sums[id(optimizer)] = (
                optimizer,
                WindowSum(self._jit_compile, needs_weight=False),
            )
            self._update_if = self._make_update()  # one traced before would leave it out
        return self._sums[id(optimizer)][1]

    def _sum_for(self, target: Target) -> WindowSum:
        """Return the sum of a target's optimizer, which is applied as the step did it."""
        whole = self._sum_of(target.optimizer)
        whole.in_pairs = target.in_pairs
        return whole

    def unit(self, optimizer: Any) -> tf.Tensor:
        """Return the unit of the optimizer's sum so far (float64 scalar)."""
        return self._sum_of(optimizer).unit.read_value()

    def add(self, target: Target, part: GradientSum, has_counted: Any) -> None:
        """Add what a batch had for one optimizer.

        Args:
            target: the optimizer and its variables.
            part: the gradients.
            has_counted: bool scalar tensor, whether any microbatch was not left out.
        """
        whole = self._sum_for(target)
        if self._run_eagerly and not whole.is_for(target.variables) and not self.is_open():
            # Layers were frozen or unfrozen since the last window. Graphs keep what they have.
            del self._sums[id(target.optimizer)]
            whole = self._sum_for(target)
        whole.add(part, target.variables, target.least, has_counted)

    def make_buffers(self, target: Target, part: GradientSum) -> None:
        """Make what `add` adds to, where it is not there yet."""
        whole = self._sum_for(target)
        if not whole.variables:
            whole.prepare(part, target.variables, target.least)

    def add_compiled(self, target: Target, part: GradientSum) -> GradientSum:
        """Add what a batch had for one optimizer, in a function that XLA compiles.

        Returns what is left for `add_rest`.
        """
        whole = self._sum_for(target)
        return whole.add_compiled(part, target.variables, target.least)

    def add_rest(self, target: Target, rest: GradientSum, has_counted: Any) -> None:
        """Add what `add_compiled` returned."""
        self._sum_of(target.optimizer).add_rest(rest, has_counted)

    def end_batch(self, noise: GradientNoise | None) -> None:
        """Count the batch, and update if it fills the window.

        Args:
            noise: what measures the noise of the gradients, or None.
        """
        is_last = fills_window.get()
        if not is_last:
            self._remaining.assign_sub(1)
        if is_last is None:
            self._is_moved_by_graphs = True
            self._update(tf.less_equal(self._remaining, 0), noise)
        elif is_last:
            self._update(True, noise)

    def _update(self, condition: Any, noise: GradientNoise | None) -> None:
        for optimizer, whole in self._sums.values():
            if whole.variables:
                whole.update(optimizer, condition, noise)
        self._statistics.update(condition)
        _strategy.run_once_if(condition, self._on_update)
        _strategy.run_if(condition, self._begin)

    def _make_update(self) -> Any:
        return self._update if self._run_eagerly else tf.function(self._update, autograph=False)

    def is_open(self) -> bool:
        """Return whether there are batches that no update has used yet."""
        return self.num_batches() != 0

    def num_batches(self) -> int:
        """Return how many batches there are that no update has used yet."""
        with tf.init_scope():  # read the values now, also while a graph is traced
            return int(self.steps.numpy() - self._remaining.numpy())

    def num_missing(self) -> int:
        """Return how many batches are missing until the window is full."""
        if self._known is None or self._is_moved_by_graphs:
            self._known = int(self._remaining.numpy())
        return self._known

    def count_batch(self, is_last: bool) -> None:
        """Note in Python that a batch was trained, as its graph did."""
        if is_last:
            self._known = self._next_known
        elif self._known is not None:
            self._known -= 1

    def close(self, noise: GradientNoise | None) -> None:
        """Make the update of a partial window. An empty one changes nothing."""
        if not tf.executing_eagerly():
            self._is_moved_by_graphs = True
            self._update(tf.not_equal(self._remaining, self.steps), noise)
        elif self.is_open():
            self._update_if(True, noise)
            self._known = None

    def note_rows(self, counts: list[Any]) -> None:
        """Note if the parts of a window's batches have numbers of samples whose ratio changes.

        With several replicas, all have to call it.

        Args:
            counts: int64 vectors, each of the numbers of samples that losses average over.
        """
        if not counts:
            return
        kind = tuple(rows.shape[0] for rows in counts)  # a trace may count a part more than once
        if kind not in self._rows:
            self._rows[kind] = _strategy.make_variables(
                lambda: [tf.zeros(rows.shape, tf.int64) for rows in counts]
            )
            self._update_if = self._make_update()  # one traced before would not begin with these
        others = _strategy.sum_over_replicas(counts)
        for rows, kept, total in zip(counts, self._rows[kind], others, strict=True):
            first = tf.where(tf.reduce_all(tf.equal(kept, 0)), rows, kept)
            kept.assign(first)
            differs = [tf.not_equal(rows * n[0], n * rows[0]) for n in (first, total)]
            self._is_uneven.assign(self._is_uneven | tf.reduce_any(differs))

    def note_lost(self, is_lost: Any) -> None:
        """Note whether a batch has a term that was made zero: a bool scalar tensor."""
        for _, whole in self._sums.values():
            if whole.note_lost(is_lost):
                self._update_if = self._make_update()  # one traced before would leave it out

    def add_logs(self, key: Hashable, vector: tf.Tensor) -> tf.Tensor:
        """Add the logged numbers of a batch, as `WindowLogs.add` does."""
        is_new = not self.logs.has(key)
        before = self.logs.add(key, vector)
        if is_new:
            self._update_if = self._make_update()  # one traced before would not begin with these
        return before

    def add_statistics(self, calls: list[Call], moments: list[Moments]) -> None:
        """Add what BatchNormalization layers have computed of a batch."""
        if self._statistics.add(calls, moments):
            self._update_if = self._make_update()  # one traced before would leave it out

    def messages(self, model: str) -> list[str]:
        """Return the warnings about the windows so far.

        Args:
            model: the name of the model.
        """
        pairs = self._sums.values()
        found = [text for optimizer, whole in pairs for text in whole.messages(optimizer)]
        if any(map(bool, _strategy.copies(self._is_uneven))):
            found.append(_uneven_parts_message(model))
        if any(whole.has_lost() for _, whole in pairs):
            found.append(_messages.lost_term_message(model))
        return found

    def discard(self) -> None:
        """Forget a partial window, also one whose first batch was interrupted."""
        for _, whole in self._sums.values():
            whole.reset()
        self._statistics.reset()
        self._begin()


def _uneven_parts_message(model: str) -> str:
    return (
        "A batch with several parts, such as labelled and unlabelled samples, has one weight in "
        "its window, so the ratio of their sizes must stay the same. Received: batches of "
        f"{model!r} in which it changes. If the loss averages over more than one part, training "
        f"differs from the full batch: keep the ratio, or {_messages.EXACT_WAY}."
    )
