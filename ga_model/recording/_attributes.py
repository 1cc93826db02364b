"""Attributes of a model that return a stand-in while a step of the model is recorded."""

from __future__ import annotations

import inspect
from typing import Any

from ga_model.recording._models import current_recording, is_recorded

_MISSING = object()


class RecordedAttribute:
    """Data descriptor of a model's attribute that answers with a stand-in while it is recorded.

    The value stays under the attribute's name in the instance's `__dict__`, where Keras's saving
    finds it.

    Args:
        name: the attribute's name.
        default: what the class has under that name, if anything.
    """

    def __init__(self, name: str, default: Any = _MISSING) -> None:
        self._name = name
        self._default = default

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self
        value = model.__dict__.get(self._name, self._default)
        if value is _MISSING:
            raise AttributeError(f"{type(model).__name__!r} object has no attribute {self._name!r}")
        recording = current_recording(model)
        return value if recording is None else self._stand_in(recording, value)

    def _stand_in(self, recording: Any, value: Any) -> Any:
        return recording.stand_in(value)

    def __set__(self, model: Any, value: Any) -> None:
        model.__dict__[self._name] = value

    def __delete__(self, model: Any) -> None:
        del model.__dict__[self._name]


class CompiledLossAttribute(RecordedAttribute):
    """The attribute where Keras keeps the compiled loss."""

    def _stand_in(self, recording: Any, value: Any) -> Any:
        return value if value is None else recording.observed_loss(value)


def watch_attributes(model: Any) -> None:
    """Make every attribute that has a stand-in a `RecordedAttribute` of the model's class."""
    for name, value in vars(model).items():
        present = inspect.getattr_static(type(model), name, _MISSING)
        if not hasattr(present, "__get__") and is_recorded(value):
            setattr(type(model), name, RecordedAttribute(name, present))
