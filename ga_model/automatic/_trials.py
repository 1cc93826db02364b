"""Trials of a microbatch size: steps without their update, which restore all state.

Two microbatches of the size in question go forward and backward, and the sums of their gradients
are held as in training. In the end everything is put back: all variables of the process, and the
Python state of the model.

Where a failed allocation would end the process, on a CPU, memory is measured: see `_budget`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ga_model.automatic._budget import Budget
from ga_model.base._context import ThreadValue
from ga_model.base._internals import global_seed, is_built, raw, set_global_seed
from ga_model.batch._passes import Passes
from ga_model.batch._window import Window
from ga_model.graphs._microbatch import Batch
from ga_model.hearing._models import optimizers_in
from ga_model.hearing._python_state import python_state
from ga_model.replicas import _strategy
from ga_model.replicas._all_variables import AllVariables

# What a step of this thread runs instead of itself, or None.
trial_that_runs = ThreadValue()


class Trials:
    """Runs steps without an update, of any size in one trace.

    Args:
        model: the model.
        batch: the batch, as Keras passes it. Of it two microbatches of each size are used.

    Attributes:
        error: the last failure, if any was not predicted.
        changed: after `undone`, the variables that a step may change before its update: all but
            trained weights and optimizers' variables, and of these what trials have changed.
    """

    def __init__(self, model: Any, batch: Any) -> None:
        self.error: Exception | None = None
        self.changed: list[Any] = []
        self._model = model
        self._batch = keras.tree.map_structure(
            lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch
        )
        self._is_built = is_built(model, [*model.metrics, *optimizers_in(vars(model))])
        self._step: Any = self._steps
        self._budget: Budget
        self._runs = 2 if model.jit_compile else 1  # the first one compiles

    def _trace(self) -> Any:
        """Make what the first call of a step creates, without running it."""
        function = tf.function(self._steps, autograph=False)
        return function, function.get_concrete_function(self._batch, tf.ones((), tf.int64))

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Build the model, and put back what trials change, but for what building makes."""
        before = python_state(self._model)
        if not self._is_built:
            self._trace()
            self._is_built = True
        state, seed, variables = python_state(self._model), global_seed(), AllVariables()
        used: list[Any] = []
        try:
            with variables.with_new():
                if not self._model.run_eagerly:
                    self._step, concrete = self._trace()
                    used += concrete.graph.variables
                self._budget = self._new_budget()
                yield
        finally:
            self.changed = self._may_change(used, variables.changed())
            variables.put_back()
            set_global_seed(seed)
            before.put_back_changed(state)

    def _new_budget(self) -> Budget:
        model = self._model
        devices = [v.device for v in _strategy.copies_of_all(model.variables)]
        sizes = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in model.trainable_variables]
        return Budget(all("CPU" in device for device in devices), sum(sizes))

    def _may_change(self, used: list[Any], changed: list[Any]) -> list[Any]:
        """Return `changed`, of variables that a graph uses and of those that trials changed."""
        model = self._model
        state = [*model.non_trainable_variables, *model.metrics_variables]
        trained = [v for o in optimizers_in(vars(model)) for v in o.variables]
        trained = _strategy.copies_of_all([*model.trainable_variables, *trained])
        copies = {id(copy): copy for copy in [*_strategy.copies_of_all(state), *used]}
        for copy in trained:
            copies.pop(id(copy), None)
        return list({**copies, **{id(copy): copy for copy in changed}}.values())

    def fits(self, size: int) -> bool:
        """Return whether two microbatches of `size` rows go through."""
        if not self._budget.allows(size):
            self.error = None
            return False
        runs = self._runs if self._budget.has_begun else 2  # the first one of all sets up a lot
        try:
            for _ in range(runs):
                with self._budget.measuring(size):
                    self._step(self._batch, tf.constant(size, tf.int64))
        except failures(self._model) as error:
            self.error = error.with_traceback(None)
            return False
        is_allowed = self._budget.allowed(size)
        if not is_allowed:
            self.error = None
        return is_allowed

    def _steps(self, data: Any, size: Any) -> Any:
        strategy = self._model.distribute_strategy
        results = strategy.run(self._on_replica, args=(data, size))
        return tf.add_n(strategy.experimental_local_results(results))

    def _on_replica(self, data: Any, size: Any) -> Any:
        with trial_that_runs.set(functools.partial(self._sums, size)):
            return type(self._model).train_step(self._model, data)

    def _sums(
        self,
        size: Any,
        model: Any,
        train_step: Callable[[Any], Any],
        data: Any,
        window: Window | None,
    ) -> Any:
        """Return a number that follows from all sums of the first microbatches."""
        is_whole = model._accumulation.takes_full_batch()
        adds_up = model._accumulation.must_add_up()
        batch = Batch(data, size, is_whole, not is_whole, adds_up)
        if not is_whole:
            batch.num_microbatches = tf.minimum(batch.num_microbatches, 2)
        if model.jit_compile and self._is_built:
            train_step = functools.partial(_stateless, train_step)
        passes = Passes(model, train_step, batch, window, trial_of=2)
        part = passes.sum_over_microbatches()
        if window is not None:
            passes.make_buffers(part)
        leaves = tf.nest.flatten([s.values() for s in part.sums], expand_composites=True)
        tensors = [leaf for leaf in leaves if leaf is not None]
        numbers = [tf.reduce_sum(tf.cast(t, tf.float32)) for t in tensors if t.dtype != tf.variant]
        with tf.control_dependencies(tensors):  # lists of rows cannot be added up
            return tf.add_n([tf.zeros(()), *numbers])


def _stateless(train_step: Callable[[Any], Any], data: Any) -> Any:
    """Let a step write to no Keras variable.

    Where an allocation fails in a function that XLA compiled, variables that it writes to are left
    with memory that was freed (TensorFlow 2.21, on a CPU).
    """
    with _Unwritten():
        return train_step(data)


class _Unwritten(keras.StatelessScope):
    """A scope in which variables keep their values, also for regularizers, which ask it."""

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        return raw(variable) if value is None else value


def failures(model: Any) -> tuple[type[Exception], ...]:
    """Return the errors that memory which is used up may show as.

    With several replicas, what is seen may be that the others were cancelled.
    """
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return tf.errors.ResourceExhaustedError, tf.errors.CancelledError
    return (tf.errors.ResourceExhaustedError,)
