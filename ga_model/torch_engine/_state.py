"""The state that a microbatch changes besides gradients, and how it is restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from ga_model.backends.torch.random_numbers import random_state, set_random_state
from ga_model.base._internals import (
    global_seed,
    layers_in,
    own_state,
    raw,
    seeds,
    set_global_seed,
)
from ga_model.base._internals_torch import times_written
from ga_model.hearing._models import computes_loss_as_keras, optimizers_in
from ga_model.hearing._python_state import is_of_library, python_state
from ga_model.torch_engine._optimizer_writes import variables_of
from ga_model.torch_engine._tensors import (
    Tensors,
    WrittenSince,
    stores_in,
    tensors_in,
)

_NUMBERS = {int, float, np.int32, np.int64, np.float32, np.float64}


class Counters:
    """The numbers that a model and its layers keep in attributes, as they are now.

    Args:
        model: the model.
        of_users: whether those of Keras's own layers are left out.
    """

    def __init__(self, model: Any, of_users: bool = False) -> None:
        parts = layers_in(model)
        self._parts = [part for part in parts if not (of_users and is_of_library(part))]
        self.take()

    def take(self) -> None:
        """Take them as they are now."""
        self._numbers = [(part, _numbers_of(part)) for part in self._parts]

    def put_back(self) -> None:
        """Let them be as they were."""
        for part, before in self._numbers:
            for name in _numbers_of(part).keys() - before.keys():
                del vars(part)[name]
            vars(part).update(before)

    def changed(self) -> list[str]:
        """Return the names of those that are others now."""
        return [
            f"the attribute `{name}` of {part.name!r}"
            for part, before in self._numbers
            for name, value in _numbers_of(part).items()
            if before.get(name) != value
        ]


def _numbers_of(part: Any) -> dict[str, Any]:
    # But for bools, by which Keras notes what happens once, such as `built`.
    return {k: v for k, v in vars(part).items() if type(v) in _NUMBERS}


class Snapshot:
    """The values of all variables of a model but the weights that are trained, of its metrics, and
    its `Counters` and `Tensors`.

    Args:
        model: the model.
        of_layers: whether frozen weights are left out, which layers do not write to.
        of_trained: whether weights that are trained are kept, too.
    """

    def __init__(self, model: Any, of_layers: bool = False, of_trained: bool = False) -> None:
        trained = set() if of_trained else {id(variable) for variable in model.trainable_weights}
        self._model = model
        variables = model.variables
        if of_layers:
            variables = [v for part in layers_in(model) for v in (*own_state(part), *seeds(part))]
        self._variables = {
            id(v): v for v in (*variables, *model.metrics_variables) if id(v) not in trained
        }
        self._values = {key: v.value.detach().clone() for key, v in self._variables.items()}
        self._counters = Counters(model)
        self._tensors = Tensors(model)

    def restore(self) -> None:
        """Restore them. What was created since starts again."""
        self._counters.put_back()
        self._tensors.put_back()
        for key, variable in self._variables.items():
            variable.assign(self._values[key])
        for metric in self._model.metrics:
            if not {id(variable) for variable in metric.variables} <= set(self._values):
                metric.reset_state()


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Leave the state of a model, and of random numbers, as it was before a block."""
    snapshot, others = Snapshot(model), _Others(model)
    try:
        yield
    finally:
        snapshot.restore()
        others.put_back()


class _Others:
    """The `python_state` of a model, and the state of all random numbers, as they are now.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._python = python_state(model)
        self._random = random_state()
        self._seed = global_seed()
        self._value = None if self._seed is None else raw(self._seed.state).detach().clone()

    def put_back(self) -> None:
        """Let it be as it was."""
        self._python.put_back()
        set_random_state(self._random)
        set_global_seed(self._seed)
        if self._seed is not None:
            self._seed.state.assign(self._value)


def clear_gradients(model: Any) -> None:
    """Leave no gradient at the weights of a model."""
    for variable in model.trainable_weights:
        raw(variable).grad = None


class Before:
    """All that a step may change before it makes an update, as it is now.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        # Keras's own step leaves frozen weights as they are, which may be many.
        self._snapshot = Snapshot(model, of_layers=computes_loss_as_keras(model))
        self._others = _Others(model)
        optimizers = optimizers_in(list(vars(model).values()))
        numbers = [v for o in optimizers for v in variables_of(o) if raw(v).numel() == 1]
        self._numbers = [(v, times_written(raw(v)), raw(v).detach().clone()) for v in numbers]

    def put_back(self) -> None:
        """Let it be as it was."""
        self._snapshot.restore()
        self._others.put_back()
        for variable, version, value in self._numbers:
            if times_written(raw(variable)) != version:
                variable.assign(value)


class Writes:
    """What a step writes to: variables are compared before and after it.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._others = [(v, _version(v)) for v in _others(model)]
        self._tensors = Tensors(model, _compared(model))
        self._counters = Counters(model)

    def others(self, is_alone: bool) -> list[str]:
        """Return what was written to, and is to be once per update: variables, tensors, attributes.

        Args:
            is_alone: whether the batch is an update by itself, before which attributes are put
                back with each microbatch.
        """
        paths = [v.path for v, version in self._others if _version(v) != version]
        paths = list(dict.fromkeys([*paths, *self._tensors.changed()]))
        return paths if is_alone else [*paths, *self._counters.changed()]


class LaterWrites:
    """What a step writes to that earlier ones did not.

    That is told by PyTorch's count of writes, and each 17th time by norms, too, which takes a pass
    over the values and finds what is written past that count: 17, as windows of 16 are frequent. A
    tensor that takes the place of another in an attribute is none: nobody may read it.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._variables = [(v.path, raw(v)) for v in _others(model)]
        self._compared = [(v.path, raw(v)) for v in _compared(model)]
        self._stores = stores_in(model)
        self._counters = Counters(model, of_users=True)
        self._written: list[WrittenSince] = []
        self._num_begun = 0
        self.told: set[str] = set()

    def begin(self) -> None:
        """Take all that there is now as not written to."""
        tensors = [(text, tensor) for text, _, _, tensor in tensors_in(self._stores)]
        self._written = [WrittenSince([*self._variables, *tensors], has_norms=False)]
        if self._num_begun % 17 == 0:
            self._written.append(WrittenSince([*self._compared, *tensors], has_norms=True))
        self._num_begun += 1
        self._counters.take()

    def names(self, is_alone: bool) -> list[str]:
        """Return what was written to, as `Writes.others` does, and was not told of before."""
        found = [name for written in self._written for name in written.names()]
        found = found if is_alone else [*found, *self._counters.changed()]
        new = [name for name in dict.fromkeys(found) if name not in self.told]
        self.told.update(new)
        return new


def _others(model: Any) -> list[Any]:
    """Return the variables that a step is not expected to write to."""
    layers = layers_in(model)
    expected = [v for layer in model._batch_normalization_layers() for v in layer.variables]
    expected += [state for layer in layers for state in seeds(layer)]
    known = {id(v) for v in (*expected, *model.metrics_variables, *_updated(model))}
    return [v for v in model.variables if id(v) not in known]


def _compared(model: Any) -> list[Any]:
    """Return those of them whose values may have to be looked at."""
    others = _others(model)
    if computes_loss_as_keras(model):  # which leaves frozen weights as they are
        state = {id(v) for part in layers_in(model) for v in own_state(part)}
        others = [v for v in others if id(v) in state]
    return others


def _updated(model: Any) -> list[Any]:
    """Return the weights that are trained, and that no layer of Keras writes to."""
    by_layers = {id(part.kernel) for part in layers_in(model) if _writes_weight(part)}
    return [v for v in model.trainable_weights if id(v) not in by_layers]


def written_weights(model: Any, has_norms: bool) -> WrittenSince:
    """Return what tells which weights a step writes to by itself, as `WrittenSince` does."""
    return WrittenSince([(v.path, raw(v)) for v in _updated(model)], has_norms)


def writes_weights(model: Any) -> bool:
    """Return whether layers of Keras write to weights that are trained, in each call."""
    return any(map(_writes_weight, layers_in(model)))


def _writes_weight(layer: Any) -> bool:
    return isinstance(layer, keras.layers.SpectralNormalization)


def _version(variable: Any) -> int:
    """Return a number that grows when a variable is written to."""
    return times_written(raw(variable))
