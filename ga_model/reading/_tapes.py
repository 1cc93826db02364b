"""Listen to the tapes of a step.

What a step takes the gradient of is known to its `tf.GradientTape` alone, which it makes itself. So
while a step is drawn, and listened to, a function stands in front of `tf.GradientTape.gradient`. It
passes everything on, and tells the thread's listener.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ga_model.base._context import ThreadValue

_listener = ThreadValue()
_lock = threading.Lock()
_listeners = 0


@contextlib.contextmanager
def heard(listener: Callable[[Any, Any], Callable[[Any], None]]) -> Iterator[None]:
    """Tell a listener of the gradients that tapes take in this thread.

    Args:
        listener: called with the targets and the sources of each, before it is taken, and returns
            what is called with the gradients.
    """
    _count(1)
    try:
        with _listener.set(listener):
            yield
    finally:
        _count(-1)


_gradient: Any = None  # what the function stands in front of


@functools.wraps(tf.GradientTape.gradient)
def _told(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    listener = _listener.get()
    if listener is None:
        return _gradient(tape, target, sources, *args, **kwargs)
    with _listener.set(None):  # of what taking a gradient does
        tell = listener(target, sources)
        gradients = _gradient(tape, target, sources, *args, **kwargs)
    tell(gradients)
    return gradients


def _count(number: int) -> None:
    """Let the function stand there while there are listeners."""
    global _listeners, _gradient
    with _lock:
        if _listeners == 0:
            _gradient = tf.GradientTape.gradient
        _listeners += number
        tf.GradientTape.gradient = _told if _listeners else _gradient
