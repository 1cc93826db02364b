"""What the core and a backend pass each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

# The variables of a model: those that are trained, its others, of its optimizer, of its metrics.
Group = Literal["trainable", "non_trainable", "optimizer", "metrics"]
GROUPS: tuple[Group, ...] = get_args(Group)


class Function(NamedTuple):
    """A function of the core that is to be compiled.

    Attributes:
        run: takes and returns nests of tensors.
        reads: groups of variables that it reads, and may write to.
        updates: groups that it reads, and writes to all variables of.
        consumes: whether the tensors of its first argument are not used again. Not if it updates:
            the memory of what it updates takes all results, and JAX warns of other that is given.
        discards: whether what it writes is not needed. Where nothing is compiled, it is there
            nevertheless, and has to be put back.
    """

    run: Callable[..., Any]
    reads: tuple[Group, ...]
    updates: tuple[Group, ...]
    consumes: bool
    discards: bool


class Applied(NamedTuple):
    """What a step has applied an optimizer to.

    Attributes:
        optimizer: the optimizer.
        variables: those that it updates, in the order of their gradients.
        via_apply_gradients: whether `apply_gradients` was called, and not `apply`.
    """

    optimizer: Any
    variables: tuple[Any, ...]
    via_apply_gradients: bool = False

    def again(self, gradients: Sequence[Any]) -> None:
        """Apply the optimizer, as the step did, to gradients of its variables, tensors or None."""
        if self.via_apply_gradients:
            self.optimizer.apply_gradients(zip(gradients, self.variables))
        else:
            self.optimizer.apply(gradients, list(self.variables))


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
        """Restore everything."""


class States:
    """Several of them, each of something else."""

    def __init__(self, *states: State) -> None:
        self._states = states

    def put_back(self) -> None:
        for state in self._states:
            state.put_back()
