"""What passes for another object, but for a few methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ga_model.hearing._models import is_recorded


class StandIn:
    """Passes everything on to an object. Subclasses define what they answer themselves.

    Args:
        original: the object.
        listener: what a subclass tells of what it is asked.
    """

    _original: Any
    _listener: Any

    def __init__(self, original: Any, listener: Any) -> None:
        object.__setattr__(self, "_original", original)
        object.__setattr__(self, "_listener", listener)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance(model.optimizer, keras.optimizers.Adam) holds
        return type(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)


def with_stand_ins(value: Any, make: Callable[[Any], Any]) -> Any:
    """Return an attribute's value with stand-ins for what has one, also in lists and dicts.

    Args:
        value: the value.
        make: returns what stands in for an optimizer or a metric.
    """
    if not is_recorded(value):
        return value
    if isinstance(value, dict):
        return {key: with_stand_ins(part, make) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [with_stand_ins(part, make) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else parts
    return make(value)
