"""User hooks of PyTorch, which see or change tensors of calls, or gradients.

Hooks run as often as in plain Keras: those of weights once, on the gradient of all samples. Calls
of layers with other hooks are not split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import torch

from ga_model.backends.torch.state import modules_in
from ga_model.base._context import ThreadValue
from ga_model.base._internals import raw
from ga_model.base._internals_torch import (
    has_hooks_on_calls,
    has_hooks_on_gradients,
    has_hooks_on_sum,
    hooks_on_gradient,
)
from ga_model.base._method_patch import MethodPatch

_noted = ThreadValue()


def reason_not_to_split(layer: keras.Layer) -> str | None:
    """Return why buffers or hooks of a layer forbid splitting its calls, or None."""
    for module in modules_in(layer):
        if any(True for _ in module.buffers(recurse=False)):
            return "it has PyTorch buffers, which a call may write to"
        if has_hooks_on_calls(module):
            return "it has forward hooks, which would see each microbatch"
        if has_hooks_on_gradients(module):
            return "it has backward hooks, which would see each microbatch"
    return None


def has_hooks(model: keras.Model) -> bool:
    """Return whether any hook sees calls of layers, or gradients of weights."""
    if any(has_hooks_on_calls(m) or has_hooks_on_gradients(m) for m in modules_in(model)):
        return True
    weights = map(raw, model.trainable_variables)
    return any(hooks_on_gradient(weight) or has_hooks_on_sum(weight) for weight in weights)


@contextlib.contextmanager
def without_hooks(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Disable the hooks on gradients of weights in a block."""
    hooks = [registered for registered in map(hooks_on_gradient, weights) if registered]
    contents = [dict(registered) for registered in hooks]
    for registered in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, content in zip(hooks, contents):
            registered.update(content)


@contextlib.contextmanager
def noting_hooks() -> Iterator[list[Callable[..., Any]]]:
    """Yield a list of the hooks on tensors that this thread registers in a block."""
    noted: list[Callable[..., Any]] = []
    with _hooks.of([torch.Tensor]), _noted.set(noted):
        yield noted


def _noting(_: Any, register_hook: Callable[..., Any]) -> Callable[..., Any]:
    def noting(tensor: torch.Tensor, hook: Callable[..., Any]) -> torch.utils.hooks.RemovableHandle:
        if (noted := _noted.get()) is not None:
            noted.append(hook)
        return register_hook(tensor, hook)

    return noting


_hooks = MethodPatch("register_hook", _noting)
