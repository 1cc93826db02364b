"""What a backend gives the core that has methods of its own."""

from __future__ import annotations

from typing import Any, Protocol


class GradientSums(Protocol):
    """Sums of gradients that a backward pass adds to."""

    def begin(self, shrink: Any, counts: Any) -> None:
        """Add the gradients that are taken from now on.

        Args:
            shrink: scalar, what the sums so far are to be multiplied by.
            counts: bool scalar, whether gradients are added, which may be NaN.
        """

    def end(self) -> list[Any]:
        """Return the sums, tensors or None."""


class State(Protocol):
    """What a step may write to, as it was at one time."""

    def put_back(self) -> None:
        """Let all be as it was."""


class States:
    """Several of them.

    Args:
        *states: each of something else.
    """

    def __init__(self, *states: State) -> None:
        self._states = states

    def put_back(self) -> None:
        for state in self._states:
            state.put_back()
