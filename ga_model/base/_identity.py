"""Compare tensors and variables by identity, because `==` compares their values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def is_in(value: object, others: Iterable[object]) -> bool:
    """Return whether an object is one of the others."""
    return any(value is other for other in others)


def unique(values: Iterable[Any]) -> list[Any]:
    """Return the objects without duplicates, in order of first occurrence."""
    return list({id(value): value for value in values}.values())
