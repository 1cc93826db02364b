"""What a step changes besides gradients, as it is at one time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import torch

from ga_model.backends.torch.random_numbers import random_state, set_random_state
from ga_model.base._identity import unique
from ga_model.base._internals import (
    global_seed,
    layers_in,
    own_state,
    raw,
    seeds,
    set_global_seed,
)
from ga_model.base._internals_torch import buffers_of, times_written
from ga_model.core.of_user import is_of_library


class State:
    """The values of variables that steps write to, of other tensors of a model, of the numbers that
    its optimizers keep, and of PyTorch's random numbers.

    Args:
        model: the model.
        optimizers: of the model.
        with_weights: whether all of its weights are among them. Else they are what layers and
            metrics keep.
    """

    def __init__(self, model: Any, optimizers: Iterable[Any], with_weights: bool = False) -> None:
        self._model = model
        layers = layers_in(model)
        variables = [v for layer in layers for v in (*own_state(layer), *seeds(layer))]
        if with_weights:
            variables = [*model.variables, *variables]
        of_optimizers = [v for o in optimizers for v in o.variables]
        numbers = [v for v in of_optimizers if raw(v).numel() == 1]  # such as the rate
        self._variables = unique([*variables, *numbers, *model.metrics_variables])
        tensors = [raw(variable) for variable in self._variables]
        self._stores = [store for layer in layers for store in _stores_in(layer)]
        self._held = [dict(store) for store in self._stores]
        tensors += [t for store in self._held for t in store.values() if _is_kept(t)]
        self._tensors = unique(tensors)
        self._versions = list(map(times_written, self._tensors))
        self._values = [tensor.detach().clone() for tensor in self._tensors]
        self._random = random_state()
        self._seed = global_seed()
        self._seed_value = None if self._seed is None else raw(self._seed.state).detach().clone()

    def differs_in(self, tensors: Iterable[Any]) -> bool:
        """Return whether one of these tensors has another value now."""
        known = {id(tensor): value for tensor, value in zip(self._tensors, self._values)}
        return any(not torch.equal(tensor, known[id(tensor)]) for tensor in tensors)

    def put_back(self) -> None:
        """Let all be as it was. Metrics that were created since start again."""
        for store, held in zip(self._stores, self._held):
            for name in [n for n, value in store.items() if torch.is_tensor(value)]:
                if name not in held:
                    del store[name]
            store.update({n: value for n, value in held.items() if torch.is_tensor(value)})
        with torch.no_grad():
            for tensor, value, version in zip(self._tensors, self._values, self._versions):
                if times_written(tensor) != version or not torch.equal(tensor, value):
                    tensor.detach().copy_(value)
        known = set(map(id, self._variables))
        for metric in self._model.metrics:
            if not {id(variable) for variable in metric.variables} <= known:
                metric.reset_state()
        set_random_state(self._random)
        set_global_seed(self._seed)
        if self._seed is not None:
            self._seed.state.assign(self._seed_value)


class LeftGradients:
    """What steps have left in `.grad`, where those of the next batch are added to it.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._left = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]

    def put_back(self) -> None:
        for parameter, gradient in self._left:
            parameter.grad = None if gradient is None else gradient.clone()


def _stores_in(layer: Any) -> list[dict[str, Any]]:
    """Return the dicts where a layer keeps tensors that are no variables."""
    modules = [module for module in layer.modules() if module is layer or not _is_layer(module)]
    buffers = [buffers for module in modules if (buffers := buffers_of(module))]
    return buffers + [vars(module) for module in modules if not is_of_library(module)]


def _is_kept(value: Any) -> bool:
    """Return whether a value is a tensor with values, as those of symbolic calls are not."""
    return torch.is_tensor(value) and not value.is_meta


def _is_layer(module: Any) -> bool:
    return isinstance(module, keras.layers.Layer)
