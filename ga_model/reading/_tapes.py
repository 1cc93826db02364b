"""Observe the tapes of a step.

What a step takes the gradient of is known to its `tf.GradientTape` alone, which it makes itself. So
while a step is drawn, and listened to, a function stands in front of `tf.GradientTape.gradient`. It
passes everything on, and tells the thread's listener.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront

_listener = ThreadValue()


@contextlib.contextmanager
def heard(listener: Callable[[Any, Any, Any], Callable[[Any], None]]) -> Iterator[None]:
    """Tell a listener of the gradients that tapes take in this thread.

    Args:
        listener: called with the targets and the sources of each, and what is passed back to the
            targets or None, before it is taken. It returns what is called with the gradients.
    """
    with _in_front.of([tf.GradientTape]), _listener.set(listener):
        yield


def _telling(_: Any, gradient: Callable[..., Any]) -> Callable[..., Any]:
    def told(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _listener.get()
        if listener is None:
            return gradient(tape, target, sources, *args, **kwargs)
        with _listener.set(None):  # of what taking a gradient does
            tell = listener(target, sources, args[0] if args else kwargs.get("output_gradients"))
            gradients = gradient(tape, target, sources, *args, **kwargs)
        tell(gradients)
        return gradients

    return told


_in_front = InFront("gradient", _telling)
