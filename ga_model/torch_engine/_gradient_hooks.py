"""PyTorch hooks that see gradients, and may change them.

In a step on the full batch they run as often as in plain Keras: those of weights when the gradient
of all samples comes, and calls with others run whole. Where gradients of microbatches are added up,
what hooks make of them has to be linear in them, as with gradients that have a rule of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront
from ga_model.base._internals import layers_in, raw
from ga_model.base._internals_torch import (
    has_hooks_on_calls,
    has_hooks_on_gradients,
    has_hooks_on_sum,
    hooks_on_gradient,
)
from ga_model.hearing._splitting import NotByRowsError
from ga_model.torch_engine._not_known import otherwise
from ga_model.torch_engine._own_gradients import is_linear

_noted = ThreadValue()


def check_call(layer: Any) -> None:
    """Raise NotByRowsError if hooks see what goes into a layer, or comes out of it."""
    if (hooks := _hooks_on(layer)) is not None:
        raise NotByRowsError(f"it has {hooks}, which would see each microbatch")


@otherwise("hooks that are not known")
def _hooks_on(layer: Any) -> str | None:
    for part in _modules_in(layer):
        if has_hooks_on_calls(part):
            return "forward hooks"
        if has_hooks_on_gradients(part):
            return "backward hooks"
    for weight in layer.parameters():
        hooks_on_gradient(weight)  # as `without_hooks` reads them
    return None


def _modules_in(layer: Any) -> list[Any]:
    """Return a layer, the layers in it, and modules of PyTorch's in these."""
    return [module for part in layers_in(layer) for module in part.modules()]


@otherwise(True)
def has_hooks(model: Any) -> bool:
    """Return whether gradients of a model go through hooks on weights or layers."""
    is_hooked = any(hooks_on_gradient(w) or has_hooks_on_sum(w) for w in model.parameters())
    return is_hooked or any(map(has_hooks_on_gradients, _modules_in(model)))


@otherwise("a hook that is not known")
def not_linear_hook(model: Any, registered: list[tuple[Any, Any]], rows: int) -> str | None:
    """Return what the first hook is that is not known to be linear and separate, or None.

    Args:
        model: the model.
        registered: pairs of a tensor and its hook, of tensors that a step computes.
        rows: samples of the step.
    """
    for part in _modules_in(model):
        if has_hooks_on_gradients(part):
            return f"a backward hook of the layer {getattr(part, 'name', '')!r}"
    for variable in model.trainable_variables:
        weight = raw(variable)
        hooks = list((hooks_on_gradient(weight) or {}).values())
        if has_hooks_on_sum(weight) or not all(_is_linear(weight, hook) for hook in hooks):
            return f"a hook on the gradient of {variable.path!r}"
    for tensor, hook in registered:
        if not _is_linear(tensor, hook, rows):
            name = getattr(hook, "__qualname__", type(hook).__name__)
            return f"the hook {name!r} on a tensor (`register_hook`)"
    return None


def _is_linear(tensor: Any, hook: Callable[[Any], Any], rows: int | None = None) -> bool:
    def pass_back(upstream: list[Any]) -> list[Any]:
        gradient = upstream[0].clone()  # which the hook may write to
        found = hook(gradient)
        return [gradient if found is None else found]

    return is_linear(pass_back, [tensor], rows)


@contextlib.contextmanager
def without_hooks(weights: Iterable[Any]) -> Iterator[None]:
    """Let gradients of weights go through no hooks, until those of all samples do."""
    hooks = [h for h in map(hooks_on_gradient, weights) if h]
    contents = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, content in zip(hooks, contents):
            h.update(content)


@contextlib.contextmanager
def noting_hooks() -> Iterator[list[tuple[Any, Any]]]:
    """Yield the tensors, and their hooks, that this thread registers in a block."""
    noted: list[tuple[Any, Any]] = []
    with _in_front.of([torch.Tensor]), _noted.set(noted):
        yield noted


def _noting(_: Any, register_hook: Callable[..., Any]) -> Callable[..., Any]:
    def noting(tensor: Any, hook: Any) -> Any:
        if (noted := _noted.get()) is not None:
            noted.append((tensor.detach(), hook))
        return register_hook(tensor, hook)

    return noting


_in_front = InFront("register_hook", _noting)
