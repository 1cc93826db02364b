"""Find the largest microbatch that fits, and halve it if a batch fails.

`microbatch_size="auto"` needs a batch in hand, before it is trained on and after it has failed. So
batches are fetched here and handed to the train function one by one.

The size is searched by trials (`_trials`). What a step may change before its update is read before
every batch, which copies nothing that stays as it is. A batch that fails before its update begins
has changed nothing else, and is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from ga_model.automatic import _messages
from ga_model.automatic._search import FoundSize
from ga_model.automatic._trials import Trials, failures, trial_that_runs
from ga_model.batch import _step
from ga_model.batch._window import Window
from ga_model.graphs._microbatch import count_rows
from ga_model.hearing._models import is_of_keras
from ga_model.hearing._python_state import python_state
from ga_model.replicas import _strategy


class AutomaticSize(FoundSize):
    """What `microbatch_size="auto"` knows of one model since its `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.has_any_rows = False
        self._variables: list[tf.Variable] = []  # that a step may change before its update
        # Variable, whether the update of a batch may have begun. Functions that are traced hold it.
        self._has_sums: Any = None
        self._before: Callable[[], list[Any]] | None = None

    # Around the train function.

    def run(self, model: Any, train_function: Callable[[Any], Any], iterator: Any) -> Any:
        """Run one execution of Keras's train function, batch by batch.

        Args:
            model: an `AccumulatingModel`.
            train_function: takes an iterator of batches, and trains with the model's present size.
            iterator: what Keras would pass.

        Raises:
            RuntimeError: not even one row fits, or memory was exhausted where the batch cannot be
                repeated.

        Warns:
            UserWarning: a batch did not fit any more, and the size was halved.
        """
        specs = tf.nest.flatten(getattr(iterator, "element_spec", ()), expand_composites=True)
        self.has_any_rows = any(spec.shape.rank and spec.shape[0] is None for spec in specs)
        logs = None
        for index in range(model.steps_per_execution):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if index == 0:
                    raise
                break
            rows = _strategy.most_on_a_replica(model.distribute_strategy, batch, count_rows)
            if self.is_to_search(rows):
                self._search(model, batch, rows)
            while True:
                values = [] if model.jit_compile else self._begin()  # where none is put back
                state = python_state(model) if model.run_eagerly else None
                try:
                    logs = train_function(iter([batch]))
                    break
                except failures(model) as error:
                    self._put_back(model, values, rows, error)
                    if state is not None:
                        state.put_back()
        return logs

    def _begin(self) -> list[Any]:
        """Return what the variables have that a step changes before its update."""
        if self._before is None:
            marks = _strategy.copies(self._has_sums)

            def before() -> list[Any]:
                for mark in marks:
                    mark.assign(False)
                return [tf.identity(variable) for variable in self._variables]

            self._before = tf.function(before, autograph=False)
        return self._before()

    def _put_back(self, model: Any, values: list[Any], rows: int, error: Exception) -> None:
        """Let a batch that failed be repeated in smaller microbatches, or raise."""
        size = min(self.size, rows)
        if model.jit_compile:
            self.fail(error, _messages.damaged_message(model.name, size))
        is_own_step = not is_of_keras(model, "train_step")
        if any(bool(mark.numpy()) for mark in _strategy.copies(self._has_sums)):
            self.fail(error, _messages.torn_message(model.name, size, is_own_step))
        for variable, value in zip(self._variables, values):
            variable.assign(value)
        self.halve(model, rows, error)

    # Inside of it.

    def run_step(
        self, model: Any, train_step: Callable[[Any], Any], data: Any, window: Window | None
    ) -> Any:
        """Run one batch as `_step.run` does, or a trial of it."""
        if (trial := trial_that_runs.get()) is not None:
            return trial(model, train_step, data, window)
        if self.size is None:
            raise RuntimeError(_messages.no_size_message(model.name))
        note_sums = None if model.jit_compile else self._note_sums
        return _step.run(model, train_step, data, window, note_sums)

    def _note_sums(self, tensors: list[Any]) -> Any:
        """Note in the graph that all sums of a batch are there, on every replica."""
        with tf.control_dependencies(tensors):
            one = _strategy.mean_over_replicas(tf.ones(()))
            return tf.identity(self._has_sums.assign(tf.greater(one, 0.0)))

    # The search.

    def _search(self, model: Any, batch: Any, rows: int) -> None:
        """Find the largest size up to `rows`, and leave all else as it is."""
        self.size = None
        model._accumulation.check_step()
        with model.distribute_strategy.scope():
            if self._has_sums is None:
                self._has_sums = _strategy.make_variables(lambda: tf.zeros((), tf.bool))
            trials = Trials(model, batch)
            try:
                with trials.undone():
                    self.find(model, rows, trials)
            finally:
                self._before, self._variables = None, trials.changed

    def fail(self, error: Exception | None, message: str) -> NoReturn:
        """Raise a RuntimeError, but where the cause may be another one than memory."""
        if isinstance(error, tf.errors.CancelledError):
            raise error
        super().fail(error, message)
