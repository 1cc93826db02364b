"""Lists of tensors and variables, compared by identity: `==` compares their values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def is_in(value: Any, others: Iterable[Any]) -> bool:
    """Return whether an object is one of others."""
    return any(value is other for other in others)


def unique(values: Iterable[Any]) -> list[Any]:
    """Return each object once, in their order."""
    return list({id(value): value for value in values}.values())
