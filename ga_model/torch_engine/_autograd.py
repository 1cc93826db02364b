"""Listen to where a step takes gradients.

A step says of what it takes them when it does, by `loss.backward()` or `torch.autograd.grad`. So
while a step of the user's own is recorded, functions stand in front of `torch.autograd.backward`,
which the method calls, and of `torch.autograd.grad`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ga_model.base._context import ThreadValue

_listener = ThreadValue()
_lock = threading.Lock()
_listeners = 0
_backward: Any = torch.autograd.backward
_grad: Any = torch.autograd.grad


@contextlib.contextmanager
def heard(recording: Any) -> Iterator[None]:
    """Tell a recording of the gradients that are taken in this thread."""
    _count(1)
    try:
        with _listener.set(recording):
            yield
    finally:
        _count(-1)


def unheard() -> contextlib.AbstractContextManager[None]:
    """Return a context in which gradients are taken that are not the step's."""
    return _listener.set(None)


@functools.wraps(torch.autograd.backward)
def _told_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    recording = _listener.get()
    if recording is None:
        return _backward(tensors, *args, **kwargs)
    with _listener.set(None):
        tensors = recording.take_gradient(tensors, bool(kwargs.get("create_graph")))
        _backward(tensors, *args, **kwargs)
    return recording.note_gradients(None)


@functools.wraps(torch.autograd.grad)
def _told_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    recording = _listener.get()
    if recording is None:
        return _grad(outputs, *args, **kwargs)
    with _listener.set(None):
        outputs = recording.take_gradient(outputs, bool(kwargs.get("create_graph")))
        gradients = _grad(outputs, *args, **kwargs)
    recording.note_gradients(gradients)
    return gradients


def _count(number: int) -> None:
    """Let the functions stand there while there are listeners."""
    global _listeners, _backward, _grad
    with _lock:
        if _listeners == 0:
            _backward, _grad = torch.autograd.backward, torch.autograd.grad
        _listeners += number
        told = (_told_backward, _told_grad) if _listeners else (_backward, _grad)
        torch.autograd.backward, torch.autograd.grad = told
