"""Find the largest microbatch that fits, and make it smaller where one fails to.

`microbatch_size="auto"` needs a batch in hand, before it is trained on and after it has failed. So
batches are fetched here and handed to the train function one by one.

A trial is the split step without its update: two microbatches of the size in question go forward
and backward, and the sums of their gradients are held as in training. In the end everything is put
back. What a step may change before its update is read before every batch, which copies nothing that
stays as it is. A batch that fails before its update begins has changed nothing else, and is
repeated.

Where a failed allocation would end the process, on a CPU, memory is measured: see `_budget`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf

from ga_model import _messages, _step, _strategy, _validate
from ga_model._budget import Budget
from ga_model._context import ThreadValue
from ga_model._internals import is_built
from ga_model._microbatch import Batch, count_rows
from ga_model._randomness import same_random_state
from ga_model._recorder import is_of_keras, optimizers_in
from ga_model._window import Window

_trial = ThreadValue()  # what a step runs instead of itself, or None


class AutomaticSize:
    """What `microbatch_size="auto"` knows of one model since its `compile`.

    The size itself is the model's `_microbatch_size`, None before it is found.

    Attributes:
        is_whole: whether no size was found that would not fit, so that batches stay whole.
    """

    def __init__(self) -> None:
        self.restart()
        self._variables: list[tf.Variable] = []  # that a step may change before its update
        # Variable, whether the update of a batch may have begun. Functions that are traced hold it.
        self._has_sums: Any = None
        self._before: Callable[[], list[Any]] | None = None

    def restart(self) -> None:
        """Forget the size."""
        self.is_whole = False
        self._rows = 0  # of the batch that the size was found with

    # Around the train function.

    def run(self, model: Any, train_function: Callable[[Any], Any], iterator: Any) -> Any:
        """Run one execution of Keras's train function, batch by batch.

        Args:
            model: an `AccumulatingModel`.
            train_function: takes an iterator of batches, and trains with the model's present size.
            iterator: what Keras would pass.

        Raises:
            RuntimeError: not even one row fits, or memory was exhausted where the batch can not be
                repeated.

        Warns:
            UserWarning: a batch did not fit any more, and the size was halved.
        """
        logs = None
        for index in range(model.steps_per_execution):
            try:
                batch = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if index == 0:
                    raise
                break
            rows = _strategy.most_on_a_replica(model.distribute_strategy, batch, count_rows)
            if model._microbatch_size is None or (self.is_whole and rows > self._rows):
                self._search(model, batch, rows)
            while True:
                values = [] if model.jit_compile else self._begin()  # where none is put back
                try:
                    logs = train_function(iter([batch]))
                    break
                except _failures(model) as error:
                    self._put_back(model, values, rows, error)
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
        size = min(model._microbatch_size, rows)
        if model.jit_compile:
            _raise_from(error, _messages.damaged_message(model.name, size))
        is_own_step = not is_of_keras(model, "train_step")
        if any(bool(mark.numpy()) for mark in _strategy.copies(self._has_sums)):
            _raise_from(error, _messages.torn_message(model.name, size, is_own_step))
        for variable, value in zip(self._variables, values):
            variable.assign(value)
        if size == 1:
            _raise_from(error, _messages.no_row_message(model.name))
        self.is_whole = False
        model._microbatch_size = (size + 1) // 2
        _validate.warn(_messages.halved_message(model.name, size, model._microbatch_size))

    # Inside of it.

    def run_step(
        self, model: Any, train_step: Callable[[Any], Any], data: Any, window: Window | None
    ) -> Any:
        """Run one batch as `_step.run` does, or a trial of it."""
        if (trial := _trial.get()) is not None:
            return trial(model, train_step, data, window)
        if model._microbatch_size is None:
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
        model._microbatch_size = None
        model._check_step()
        with model.distribute_strategy.scope():
            if self._has_sums is None:
                self._has_sums = _strategy.make_variables(lambda: tf.zeros((), tf.bool))
            trials = _Trials(model, batch)
            with trials.undone():
                size, failed = _largest(trials.fits, rows)
        self._before, self._variables = None, trials.changed
        if size == 0:
            _raise_from(trials.error, _messages.no_row_message(model.name))
        self.is_whole, self._rows = failed is None, rows
        model._microbatch_size = size
        print(_messages.found_message(size, failed, trials.error is not None), flush=True)


def _largest(fits: Callable[[int], bool], most: int) -> tuple[int, int | None]:
    """Return the largest size that fits, 0 if none does, and the smallest that does not, if any."""
    fitting, size = 0, 1
    while fits(size):
        fitting = size
        if size == most:
            return size, None
        size = min(2 * size, most)
    while size - fitting > 1:
        middle = (fitting + size) // 2
        if fits(middle):
            fitting = middle
        else:
            size = middle
    return fitting, size


class _Trials:
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
        self._model = model
        self._batch = keras.tree.map_structure(
            lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch
        )
        self._is_built = is_built(model, [*model.metrics, *optimizers_in(vars(model))])
        if not self._is_built:
            self._trace()
            self._is_built = True
        self._step: Any = self._steps
        used: list[Any] = []
        with same_random_state():
            if not model.run_eagerly:
                self._step, concrete = self._trace()
                used += concrete.graph.variables
        trained = [v for o in optimizers_in(vars(model)) for v in o.variables]
        self._trained = _strategy.copies_of_all([*model.trainable_variables, *trained])
        state = [*model.non_trainable_variables, *model.metrics_variables]
        copies = {id(copy): copy for copy in [*_strategy.copies_of_all(state), *used]}
        for copy in self._trained:
            copies.pop(id(copy), None)
        self.changed = list(copies.values())
        self._budget = Budget(model)
        self._runs = 2 if model.jit_compile else 1  # the first one compiles

    def _trace(self) -> Any:
        """Make what the first call of a step creates, without running it."""
        function = tf.function(self._steps, autograph=False)
        return function, function.get_concrete_function(self._batch, tf.ones((), tf.int64))

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what trials change: variables, and the random state of Python and NumPy."""
        variables = [*self._trained, *self.changed]
        values = [tf.identity(variable) for variable in variables]  # not copied before it changes
        try:
            with same_random_state():
                yield
        finally:
            for variable, value in zip(self._trained, values):  # that the step itself writes to
                if not bool(tf.reduce_all(tf.equal(variable, value))):
                    self.changed.append(variable)
            for variable, value in zip(variables, values):
                variable.assign(value)

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
        except _failures(self._model) as error:
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
        with _trial.set(functools.partial(self._sums, size)):
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
        is_whole = model._takes_full_batch()
        batch = Batch(data, size, is_whole, not is_whole, self._model._must_add_up())
        if not is_whole:
            batch.num_microbatches = tf.minimum(batch.num_microbatches, 2)
        if model.jit_compile and self._is_built:
            train_step = functools.partial(_stateless, train_step)
        step = _step.Step(model, train_step, batch, window, trial_of=2)
        part = step.sum_over_microbatches()
        if window is not None:
            step.make_buffers(part)
        tensors = tf.nest.flatten([s.values() for s in part.sums], expand_composites=True)
        numbers = [tf.reduce_sum(tf.cast(t, tf.float32)) for t in tensors if t is not None]
        return tf.add_n([tf.zeros(()), *numbers])


def _stateless(train_step: Callable[[Any], Any], data: Any) -> Any:
    """Let a step write to no Keras variable.

    Where an allocation fails in a function that XLA compiled, variables that it writes to are left
    with memory that was freed (TensorFlow 2.21, on a CPU).
    """
    with keras.StatelessScope():
        return train_step(data)


def _failures(model: Any) -> tuple[type[Exception], ...]:
    """Return the errors that memory which is used up may show as.

    With several replicas, what is seen may be that the others were cancelled.
    """
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return tf.errors.ResourceExhaustedError, tf.errors.CancelledError
    return (tf.errors.ResourceExhaustedError,)


def _raise_from(error: Exception | None, message: str) -> NoReturn:
    """Raise a RuntimeError with another error as its cause."""
    if isinstance(error, tf.errors.CancelledError):
        raise error  # whose cause may be another one than memory
    raised = RuntimeError(message)
    raised.add_note(f"The error was: {error}")  # of `fit`, Keras takes the cause away
    raise raised from error
