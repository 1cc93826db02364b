"""Run the step of a model in a trial."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
from keras import ops

from ga_model.base import _numbers
from ga_model.base._in_front import InFront
from ga_model.base._internals import copy_of, layers_in, num_updates, seeds
from ga_model.core.backend import GROUPS, Backend
from ga_model.core.losses import Position
from ga_model.core.proof.draws import Draws
from ga_model.core.proof.trial import Outcome
from ga_model.core.proof.weighing import Seen
from ga_model.core.recorder import record
from ga_model.hearing._split import num_rows, part_of


class StepRunner:
    """Runs the `train_step` of a model, as `trial.Runner` has it.

    Args:
        model: the model.
        backend: what it runs on.
        data: the samples of the trial, a nest of arrays.
    """

    def __init__(self, model: Any, backend: Backend, data: Any) -> None:
        self._model = model
        self._backend = backend
        self._data = data
        self._total = num_rows(data)
        self._runs = itertools.count()
        counter = num_updates(model.optimizer)
        groups = (model.trainable_variables, model.non_trainable_variables, model.metrics_variables)
        self._variables = [*(v for group in groups for v in group), counter]
        self.names = [variable.path for variable in self._variables]
        self.trained = list(range(len(model.trainable_variables)))
        random = {id(seed) for layer in layers_in(model) for seed in seeds(layer)}
        metrics = set(map(id, model.metrics_variables))
        self.is_free = [id(v) in random for v in self._variables]
        self.is_moved = [
            id(v) not in random and id(v) not in metrics and v is not counter
            for v in self._variables
        ]
        self.counter: int | None = len(self._variables) - 1
        self.epsilon = float(np.finfo("float32").eps)
        read = backend.compiled("values", self._values, GROUPS)
        self.start = [ops.convert_to_numpy(value) for value in read()]

    def _values(self) -> list[Any]:
        return [copy_of(variable) for variable in self._variables]

    def run(self, begin: int, end: int, values: list[Any], rate: float) -> Outcome:
        """Run the step, as `trial.Runner` has it."""
        run = self._backend.compiled(
            ("trial", end - begin), functools.partial(self._run, end - begin), GROUPS, discards=True
        )
        data = part_of(self._data, begin, end)
        found = run(values, data, np.float32(rate), np.int32(begin), np.int32(next(self._runs)))
        leaves = keras.tree.map_structure(
            lambda x: None if x is None else ops.convert_to_numpy(x), found
        )
        gradients, after, numbers, logs, of_loss, divisors = leaves
        return Outcome(gradients, after, numbers, logs, Seen(end - begin, divisors, of_loss))

    def _run(
        self, rows: int, values: list[Any], data: Any, rate: Any, begin: Any, number: Any
    ) -> tuple[Any, ...]:
        for variable, value in zip(self._variables, values):
            variable.assign(value)
        step = functools.partial(self._step, rate, rows < self._total)
        draws = Draws(rows, self._total, begin, number)
        found, divisors = self._backend.noting(step, (data,), draws)
        gradients, numbers, logs, of_loss = found
        return gradients, self._values(), numbers, logs, of_loss, divisors

    def _step(self, rate: Any, is_part: bool, data: Any) -> tuple[Any, ...]:
        model, backend = self._model, self._backend
        zero = _numbers.float64(0.0)
        position = Position(1.0, 1.0, 1.0, zero == 0, zero, None, False)
        with (
            model._accumulation.holding_back(),
            averaging(layers_in(model)),
            record(
                model, data, position, backend, is_own=True, rate=rate, waits=is_part
            ) as recording,
        ):
            logs, _ = backend.run_step(data)
        if is_part:  # those metrics have nothing of it yet, and what they get is compared instead
            waiting = {id(v) for update, _ in recording.updates() for v in update.metric.variables}
            pairs = zip(self._variables, self.is_free)
            self.is_free = [is_free or id(v) in waiting for v, is_free in pairs]
        own, _ = recording.split_logs(logs)
        return recording.gradients, recording.numbers(), own, recording.weight_of_loss()


def averaging(layers: Iterable[Any]) -> AbstractContextManager[None]:
    """Return a context in which BatchNormalization layers normalize by their running averages."""
    normal = keras.layers.BatchNormalization
    return _averaging.of(layer for layer in layers if isinstance(layer, normal))


def _without_training(_: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def averaged(inputs: Any, training: Any = None, **kwargs: Any) -> Any:
        return call(inputs, training=False, **kwargs)

    return averaged


_averaging = InFront("call", _without_training)


def samples_for_trial(data: Any, number: int) -> Any:
    """Return so many samples of a batch, as arrays: altered copies, too, if it has fewer."""
    rows, generator = num_rows(data), np.random.default_rng(0)
    chosen = np.sort(generator.permutation(rows)[:number])

    def taken(leaf: Any) -> Any:
        if leaf is None or not ops.shape(leaf):
            return leaf
        array = ops.convert_to_numpy(leaf)
        return array[chosen] if rows >= number else _altered(array, number, generator)

    return keras.tree.map_structure(taken, data)


def _altered(array: Any, number: int, generator: Any) -> Any:
    """Return samples of which the first are those of an array, and the others new mixtures."""
    rows = len(array)
    chosen = np.concatenate([np.arange(rows), generator.integers(0, rows, number - rows)])
    found = np.array(array[chosen])
    if found.dtype.kind == "f" and rows < 3:
        noise = generator.normal(size=(2, *found[rows:].shape))
        size = float(np.sqrt(np.mean(np.square(array)))) or 1.0
        found[rows:] = found[rows:] * (1 + 0.3 * noise[0]) + size * noise[1]
    elif found.dtype.kind in "iu" and rows < 3 and found.ndim > 1:
        found[rows:] = generator.permuted(found[rows:], axis=-1)
    return found
