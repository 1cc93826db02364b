"""Types that the core and a backend exchange."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

import keras

from ga_model.base._types import Gradient, Nest, Scalar

# The groups of variables of a model, as Keras's attributes `trainable_variables` and so on.
Group = Literal["trainable", "non_trainable", "optimizer", "metrics"]
GROUPS: tuple[Group, ...] = get_args(Group)

Name: TypeAlias = str | tuple[Hashable, ...]  # of a compiled function


class Function(NamedTuple):
    """A function of the core to compile.

    Attributes:
        run: the function, from nests of tensors to nests of tensors.
        reads: groups of variables that it reads, and may write to.
        updates: groups that it reads, and all of whose variables it writes to.
        consumes: whether its first argument may be donated. False if it updates: its results take
            the memory of the updated variables, and JAX warns of other donated buffers.
    """

    run: Callable[..., Nest]
    reads: tuple[Group, ...]
    updates: tuple[Group, ...]
    consumes: bool


class Applied(NamedTuple):
    """An optimizer that a step applies, and to which variables.

    Attributes:
        optimizer: the optimizer.
        variables: the variables that it updates, in the order of their gradients.
        via_apply_gradients: whether the step called `apply_gradients` instead of `apply`.
    """

    optimizer: keras.optimizers.Optimizer
    variables: tuple[keras.Variable, ...]
    via_apply_gradients: bool = False

    def reapply(self, gradients: Sequence[Gradient]) -> None:
        """Apply the optimizer as the step did, to other gradients: tensors or None."""
        if self.via_apply_gradients:
            self.optimizer.apply_gradients(zip(gradients, self.variables))
        else:
            self.optimizer.apply(gradients, list(self.variables))


class GradientSums(Protocol):
    """Sums of gradients that a backward pass adds to."""

    def begin(self, shrink: Scalar, counts: Scalar) -> None:
        """Start to add the gradients of the next backward pass.

        Args:
            shrink: factor for the sums so far.
            counts: bool scalar, False to leave these gradients out: they may be NaN.
        """

    def end(self) -> list[Gradient]:
        """Return the sums: tensors or None."""


class State(Protocol):
    """A snapshot of what a step may write to."""

    def restore(self) -> None:
        """Restore everything."""


class States:
    """Several snapshots, restored in order."""

    def __init__(self, *states: State) -> None:
        self._states = states

    def restore(self) -> None:
        for state in self._states:
            state.restore()
