"""Inspect a model: its optimizers, overridden methods, and the recording of its step."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import keras

from ga_model.base._context import ThreadValue

if TYPE_CHECKING:
    from ga_model.core.recorder import Recording

recording_of_thread = ThreadValue()  # the `Recording` of the step that this thread runs


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Return a context in which no patch of this package takes effect."""
    return recording_of_thread.set(None)


def current_recording(model: keras.Model) -> Recording | None:
    """Return the recording of `model` that is running in this thread, or None."""
    recording = recording_of_thread.get()
    return recording if recording is not None and recording.model is model else None


def optimizers_in(value: Any) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers in a value: itself, or in nested lists and dicts."""
    return instances_in(value, keras.optimizers.Optimizer)


def instances_in(value: Any, classes: type | tuple[type, ...]) -> list[Any]:
    """Return the instances of `classes` in a value: itself, or in nested lists and dicts.

    Must be fast: steps that run eagerly call it in every batch, on lists of all layers.
    """
    if (kind := _kind_of(value.__class__, classes)) is None:
        return []
    if kind == "instance":
        return [value]
    parts = value.values() if kind == "dict" else value
    likely = [part for part in parts if _kind_of(part.__class__, classes) is not None]
    return [instance for part in likely for instance in instances_in(part, classes)]


@functools.lru_cache(maxsize=4096)
def _kind_of(cls: type, classes: type | tuple[type, ...]) -> str | None:
    """Return how `instances_in` treats instances of a class."""
    if issubclass(cls, dict):
        return "dict"
    if issubclass(cls, (list, tuple)):
        return "list"
    return "instance" if issubclass(cls, classes) else None


def is_of_keras(model: keras.Model | keras.optimizers.Optimizer, name: str) -> bool:
    """Return whether a model's method, below this package's, is that of `keras.Model`.

    Args:
        model: a model, or an optimizer, whose method may be that of any Keras class.
        name: name of the method.
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
