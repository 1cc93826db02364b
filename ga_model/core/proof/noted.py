"""Notes the scalars that code divides by while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ga_model.core.proof.draws import Draws


class Noted:
    """What a backend's `Noting` notes.

    Args:
        draws: what random numbers are drawn by, or None: as always.

    Attributes:
        scalars: those that were divided by, bounded or decided by, by names.
        of_shapes: names of those that follow from shapes alone, if known.
        dtypes: names of the dtypes that were computed in, if known.
    """

    def __init__(self, draws: Draws | None) -> None:
        self.scalars: dict[str, Any] = {}
        self.of_shapes: set[str] = set()
        self.dtypes: set[str] = set()
        self._draws = draws

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a function, and note its operations."""
        raise NotImplementedError

    def note(self, operation: str, value: Any, is_of_shapes: bool = False) -> None:
        """Note a scalar of an operation."""
        name = f"{len(self.scalars):05} {operation}"
        self.scalars[name] = value
        if is_of_shapes:
            self.of_shapes.add(name)
