"""Snapshots of what steps change: variables, other tensors, gradients in `.grad`, random state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch

from ga_model.base._identity import unique
from ga_model.base._internals import layer_state, layers_in, raw
from ga_model.base._internals_torch import buffers_of, times_written
from ga_model.core.snapshots import VariableSnapshot
from ga_model.core.user_code import is_of_library


class State(VariableSnapshot):
    """The values of variables and other tensors in layers, and the state of random numbers."""

    def __init__(self, model: keras.Model, variables: Sequence[keras.Variable]) -> None:
        super().__init__(model, variables)
        tensors = list(map(raw, self._variables))
        modules = modules_in(model)
        self._stores = [buffers for module in modules if (buffers := buffers_of(module))]
        self._stores += [vars(module) for module in modules if not is_of_library(module)]
        self._held = [dict(store) for store in self._stores]
        tensors += [t for store in self._held for t in store.values() if _has_values(t)]
        self._values = [(t, times_written(t), t.detach().clone()) for t in unique(tensors)]
        self._random = random_state()

    def differs_in(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether any of these tensors has changed."""
        known = {id(tensor): value for tensor, _, value in self._values}
        return any(not torch.equal(tensor, known[id(tensor)]) for tensor in tensors)

    def restore(self) -> None:
        for store, held in zip(self._stores, self._held):
            for name in [n for n, value in store.items() if torch.is_tensor(value)]:
                if name not in held:
                    del store[name]
            store.update({n: value for n, value in held.items() if torch.is_tensor(value)})
        with torch.no_grad():
            for tensor, version, value in self._values:
                if times_written(tensor) != version or not torch.equal(tensor, value):
                    tensor.detach().copy_(value)
        set_random_state(self._random)
        super().restore()


class TensorSnapshot:
    """The tensors that a layer call may write to: state variables, and tensors in attributes.

    Attributes:
        modules: the layer, and all modules in it.
    """

    def __init__(self, layer: keras.Layer) -> None:
        self.modules = modules_in(layer)
        found = [(v.path, raw(v)) for part in layers_in(layer) for v in layer_state(part)]
        found += [
            (f"the tensor `{name}` of {getattr(module, 'name', type(module).__name__)!r}", value)
            for module in self.modules
            for name, value in vars(module).items()
            if _has_values(value)
        ]
        self._found = [(n, t, times_written(t), t.detach().clone()) for n, t in found]

    def written(self, by_value: bool = False) -> list[str]:
        """Return the names of changed tensors; `by_value` also finds writes through `.data`."""
        return [
            name
            for name, tensor, version, value in self._found
            if times_written(tensor) != version or (by_value and not _is_same(tensor, value))
        ]

    def restore(self) -> None:
        """Restore their values."""
        for _, tensor, _, value in self._found:
            if not _is_same(tensor, value):
                tensor.detach().copy_(value)


def _is_same(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    is_same = torch.allclose(tensor.detach(), value, rtol=0.0, atol=0.0, equal_nan=True)
    return bool(is_same)


class Versions:
    """How often tensors were written to. What a trial writes and restores does not count."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.restore()

    def restore(self) -> None:
        """Begin to count anew, as the values of the tensors were restored."""
        self._noted = list(map(times_written, self._tensors))

    def differ(self) -> bool:
        """Return whether any of the tensors was written to."""
        return self._noted != list(map(times_written, self._tensors))


class LeftGradients:
    """The gradients that steps left in `.grad`, to which the next batch adds its own."""

    def __init__(self, model: keras.Model) -> None:
        self._left = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]

    def restore(self) -> None:
        for parameter, gradient in self._left:
            parameter.grad = None if gradient is None else gradient.clone()


def modules_in(layer: keras.Layer) -> list[torch.nn.Module]:
    """Return a layer, its sublayers, and the other modules of PyTorch in them, at any depth."""
    return unique(module for part in layers_in(layer) for module in part.modules())


def _has_values(value: Any) -> bool:
    """Return whether a value is a tensor with values, unlike those of symbolic calls."""
    return torch.is_tensor(value) and not value.is_meta


def random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the random states of the CPU and of each GPU."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), on_gpus


def set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def preserving_random_state() -> AbstractContextManager[None]:
    """Return a context that restores the random state at its end."""
    number = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return torch.random.fork_rng(range(number))  # type: ignore[no-any-return]


def seed_random(seed: int) -> None:
    """Seed all generators. `torch.manual_seed` is slow before GPUs are used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
