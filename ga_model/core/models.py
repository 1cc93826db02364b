"""A model's attributes and overridden methods, and whether its step is being recorded."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras

from ga_model.base._context import ThreadValue

recording_of_thread = ThreadValue()  # the `Recording` that runs in this thread


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Return a context in which nothing of models has a stand-in."""
    return recording_of_thread.set(None)


def current_recording(model: Any) -> Any:
    """Return the recording of `model` that is running in this thread, or None."""
    recording = recording_of_thread.get()
    return recording if recording is not None and recording.model is model else None


def optimizers_in(value: Any) -> list[Any]:
    """Return the optimizers that a value is, or that a list or dict in it holds."""
    return instances_in(value, keras.optimizers.Optimizer)


def instances_in(value: Any, classes: Any) -> list[Any]:
    """Return the instances of `classes` that a value is, or that a list or dict in it holds.

    Steps that run eagerly ask in every batch, of lists of all layers.
    """
    if (kind := _kind_of(value.__class__, classes)) is None:
        return []
    if kind == "instance":
        return [value]
    parts = value.values() if kind == "dict" else value
    likely = [part for part in parts if _kind_of(part.__class__, classes) is not None]
    return [instance for part in likely for instance in instances_in(part, classes)]


@functools.lru_cache(maxsize=4096)
def _kind_of(of_value: type, classes: Any) -> str | None:
    """Return what instances of a class are to `instances_in`."""
    if issubclass(of_value, dict):
        return "dict"
    if issubclass(of_value, (list, tuple)):
        return "list"
    return "instance" if issubclass(of_value, classes) else None


def is_of_keras(model: Any, name: str) -> bool:
    """Return whether a method is that of every model of Keras's, below this package's.

    Args:
        model: a model, or an optimizer of Keras's.
        name: of the method.
    """
    if name in vars(model):  # assigned to the instance
        return False
    for owner in type(model).__mro__:
        module = str(getattr(vars(owner).get(name), "__module__", "ga_model"))
        if not module.startswith("ga_model"):
            is_optimizer = isinstance(model, keras.optimizers.Optimizer)
            is_of_all = is_optimizer or owner in keras.Model.__mro__
            return is_of_all and module.startswith("keras.")
    return False
