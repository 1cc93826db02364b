"""Observe the tapes of a step.

What a step takes the gradient of is known to its `tf.GradientTape` alone, which it makes itself. So
while a step is drawn, and listened to, a function stands in front of `tf.GradientTape.gradient`. It
passes everything on, and tells the thread's listener.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import tensorflow as tf

from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront

_listener = ThreadValue()


class Listener(Protocol):
    """What is told of gradients."""

    def listen(self, target: Any, sources: Any, upstream: Any) -> Callable[[Any], None]:
        """Take what a gradient will be of.

        Args:
            target, sources: what is differentiated, and with respect to what.
            upstream: what is passed back to the targets, or None.

        Returns:
            What is called with the gradients.
        """

    def note_jacobian(self, jacobian: Any, target: Any, source: Any) -> None:
        """Take the derivatives of each sample's targets with respect to its sources."""


@contextlib.contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """Tell a listener of the gradients that tapes take in this thread."""
    tapes = [tf.GradientTape]
    with _gradients.of(tapes), _jacobians.of(tapes), _listener.set(listener):
        yield


def _telling(_: Any, gradient: Callable[..., Any]) -> Callable[..., Any]:
    def told(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _listener.get()
        if listener is None:
            return gradient(tape, target, sources, *args, **kwargs)
        with _listener.set(None):  # of what taking a gradient does
            tell = listener.listen(
                target, sources, args[0] if args else kwargs.get("output_gradients")
            )
            gradients = gradient(tape, target, sources, *args, **kwargs)
        tell(gradients)
        return gradients

    return told


def _telling_of_jacobians(_: Any, batch_jacobian: Callable[..., Any]) -> Callable[..., Any]:
    def told(tape: Any, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _listener.get()
        with _listener.set(None):
            jacobian = batch_jacobian(tape, target, source, *args, **kwargs)
        if listener is not None:
            listener.note_jacobian(jacobian, target, source)
        return jacobian

    return told


_gradients = InFront("gradient", _telling)
_jacobians = InFront("batch_jacobian", _telling_of_jacobians)
