"""What passes for another object, but for a few methods."""

from __future__ import annotations

from typing import Any


class StandIn:
    """Passes everything on to an object. Subclasses define what they answer themselves.

    Args:
        original: the object.
        listener: the object that a subclass notifies.
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


def original_of(value: Any) -> Any:
    """Return what a stand-in stands for, or the value itself if it is none."""
    return vars(value)["_original"] if isinstance(value, StandIn) else value
