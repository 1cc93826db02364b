"""Observe where a step takes gradients.

A step says of what it takes them when it does, by `loss.backward()` or `torch.autograd.grad`. So
while a step of the user's own is recorded, functions stand in front of `torch.autograd.backward`,
which the method calls, and of `torch.autograd.grad`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront

_listener = ThreadValue()


@contextlib.contextmanager
def heard(recording: Any) -> Iterator[None]:
    """Tell a recording of the gradients that are taken in this thread."""
    owners = [torch.autograd]
    with _backward.of(owners), _grad.of(owners), _listener.set(recording):
        yield


def unheard() -> contextlib.AbstractContextManager[None]:
    """Return a context in which gradients are taken that are not the step's."""
    return _listener.set(None)


def _telling_backward(_: Any, backward: Callable[..., Any]) -> Callable[..., Any]:
    def told(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        recording = _listener.get()
        if recording is None:
            return backward(tensors, *args, **kwargs)
        with _listener.set(None):
            recording.note_backward()
            tensors = recording.take_gradient(tensors)
            backward(tensors, *args, **kwargs)
        return recording.note_gradients(None)

    return told


def _telling_grad(_: Any, grad: Callable[..., Any]) -> Callable[..., Any]:
    def told(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        recording = _listener.get()
        if recording is None:
            return grad(outputs, *args, **kwargs)
        with _listener.set(None):
            outputs = recording.take_gradient(outputs, bool(kwargs.get("create_graph")))
            gradients = grad(outputs, *args, **kwargs)
        recording.note_gradients(gradients)
        return gradients

    return told


_backward = InFront("backward", _telling_backward)
_grad = InFront("grad", _telling_grad)
