"""`microbatch_size="auto"` on PyTorch: trials of a size, and retried batches.

A trial runs a step on the batch without its update: two microbatches go forward and backward, and
the sums of their gradients are held as in training. In the end everything is put back.

Where an allocation fails, PyTorch raises an error, and goes on. Where it would end the process, on
a CPU, memory is measured: see `automatic/_budget.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ga_model.automatic import _messages
from ga_model.automatic._budget import Budget
from ga_model.automatic._search import FoundSize
from ga_model.backends.torch import refusals
from ga_model.backends.torch.memory import is_exhausted, released
from ga_model.backends.torch.random_numbers import random_state, set_random_state
from ga_model.base._call_again import PythonState
from ga_model.base._internals import is_built, layers_in, own_state, raw, seeds
from ga_model.base._internals_torch import times_written
from ga_model.hearing._models import computes_loss_as_keras, is_of_keras, optimizers_in
from ga_model.hearing._split import Batch


class AutomaticSize(FoundSize):
    """What `microbatch_size="auto"` knows of one model since its `compile`.

    Args:
        model: the `AccumulatingModel`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._changed: list[Any] = []  # variables that a step may change before its update

    def run(self, train_step: Callable[[Any], Any], data: Any) -> Any:
        """Train on a batch, in smaller microbatches where it does not fit.

        Args:
            train_step: the model's own.
            data: the batch, as Keras passes it.

        Raises:
            RuntimeError: not even one sample fits, or memory was used up in the update.

        Warns:
            UserWarning: a batch did not fit any more, and the size was halved.
        """
        model, rows = self._model, Batch(data, None).rows
        if self.is_to_search(rows):
            self._search(train_step, data, rows)
        while True:
            before = _State(model, self._changed, [*model.trainable_variables, *_states(model)])
            window = model._accumulation.window if model._accumulation.accumulates() else None
            if window is not None:
                window.begin_batch()
            try:
                return model._accumulation.train(train_step, data)
            except Exception as error:
                if not is_exhausted(error):
                    raise
                failure = released(error)
            if before.has_updated():
                is_own_step = not is_of_keras(model, "train_step")
                size = min(self.size, rows)
                self.fail(failure, _messages.torn_message(model.name, size, is_own_step))
            before.put_back()
            if window is not None:
                window.take_back()
            self.halve(model, rows, failure)

    def _search(self, train_step: Callable[[Any], Any], data: Any, rows: int) -> None:
        """Find the largest size up to `rows`, and leave all else as it is."""
        self.size = None
        accumulation = self._model._accumulation
        trials = _Trials(self._model, train_step, data)
        try:
            with accumulation.holding_back() as told, trials.undone():
                self.find(self._model, rows, trials)
        finally:
            self._changed = trials.changed
        if self.size < rows or accumulation.accumulates():
            for message in told:
                accumulation.warn_once(message)
        else:  # nothing is split, and there is nothing to report
            accumulation.forget_probes()


class _State:
    """What a batch may change before its update, as it is before the batch.

    Args:
        model: the model.
        changed: variables, which are copied.
        updated: variables that the update changes.
    """

    def __init__(self, model: Any, changed: list[Any], updated: list[Any]) -> None:
        self._values = [(v, raw(v).detach().clone()) for v in changed]
        left_out = {id(v) for v in changed}
        updated = [v for v in updated if id(v) not in left_out]
        self._versions = [(v, times_written(raw(v))) for v in updated]
        self._python = PythonState(model)
        self._random = random_state()

    def has_updated(self) -> bool:
        """Return whether the update has begun."""
        return any(times_written(raw(v)) != version for v, version in self._versions)

    def put_back(self, with_attributes: bool = True) -> None:
        for variable, value in self._values:
            variable.assign(value)
        if with_attributes:
            self._python.put_back()
        set_random_state(self._random)


class _Trials:
    """Runs steps without an update.

    Args:
        model: the model.
        train_step: its own.
        data: the batch, as Keras passes it. Two microbatches of each size are used.

    Attributes:
        error: the last failure, if any was not predicted.
        changed: after `undone`, the variables that a step may change before its update.
    """

    def __init__(self, model: Any, train_step: Callable[[Any], Any], data: Any) -> None:
        self.error: Exception | None = None
        self.changed: list[Any] = []
        self._model = model
        self._train_step = train_step
        self._data = data
        weights = model.trainable_variables
        sizes = [raw(v).nelement() * raw(v).element_size() for v in weights]
        is_on_cpu = all(raw(v).device.type == "cpu" for v in model.variables)
        self._budget = Budget(is_on_cpu, sum(sizes))

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what trials change.

        Raises:
            ValueError: an optimizer has updated weights that is not known here.
        """
        model = self._model
        is_own = not (is_of_keras(model, "train_step") and computes_loss_as_keras(model))
        if is_own:  # which may write to anything
            watched = [*model.variables, *_states(model)]
        else:
            watched = [v for part in layers_in(model) for v in (*own_state(part), *seeds(part))]
        watched = list({id(v): v for v in (*watched, *model.metrics_variables)}.values())
        was_built = is_built(model)
        known = {id(v) for v in watched}
        trained = {id(v) for v in model.trainable_variables}
        before = _State(model, watched, [])
        versions = [times_written(raw(v)) for v in watched]
        try:
            yield
        finally:
            self.changed = [v for v, n in zip(watched, versions) if times_written(raw(v)) != n]
            before.put_back(was_built)
            for metric in model.metrics:
                made = [v for v in metric.variables if id(v) not in known]
                self.changed += made
                if made:
                    metric.reset_state()
        if any(id(v) in trained for v in self.changed):
            raise ValueError(refusals.unknown_update_message(model.name))

    def fits(self, size: int) -> bool:
        """Return whether two microbatches of `size` samples go through."""
        if not self._budget.allows(size):
            self.error = None
            return False
        try:
            for _ in range(1 if self._budget.has_begun else 2):  # the first of all sets up a lot
                with self._budget.measuring(size):
                    self._model._accumulation.try_size(self._train_step, self._data, size)
        except Exception as error:
            if not is_exhausted(error):
                raise
            self.error = released(error)
            return False
        is_allowed = self._budget.allowed(size)
        if not is_allowed:
            self.error = None
        return is_allowed


def _states(model: Any) -> list[Any]:
    """Return the variables of a model's optimizers."""
    return [v for optimizer in optimizers_in(vars(model)) for v in optimizer.variables]
