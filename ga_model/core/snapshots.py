"""Snapshots of the variables that steps write to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras

from ga_model.base._context import ThreadValue
from ga_model.base._identity import unique
from ga_model.base._internals import (
    copy_of,
    global_seed,
    layer_state,
    layers_in,
    seeds,
    set_global_seed,
    stateless_scope,
)
from ga_model.base._method_patch import MethodPatch
from ga_model.base._types import Tensor
from ga_model.core.backend import Backend
from ga_model.core.models import optimizers_in


def state_variables(
    model: keras.Model, optimizers: Iterable[keras.optimizers.Optimizer], with_weights: bool = False
) -> list[keras.Variable]:
    """Return the variables that a model's steps write to.

    Args:
        with_weights: whether to include all weights, and not only state of layers and metrics, and
            the state of optimizers of models inside, which a step may apply.
    """
    layers = layers_in(model)
    variables = [v for layer in layers for v in (*layer_state(layer), *seeds(layer))]
    if with_weights:
        inner = [o for layer in layers if layer is not model for o in optimizers_in(vars(layer))]
        variables = [*model.variables, *variables, *(v for o in inner for v in o.variables)]
    of_optimizers = [v for optimizer in optimizers for v in optimizer.variables]
    numbers = [v for v in of_optimizers if len(v.shape) == 0]  # such as the learning rate
    return unique([*variables, *numbers, *model.metrics_variables])


class VariableSnapshot:
    """A snapshot of `state_variables` and Keras's global seed. A subclass keeps the values."""

    def __init__(self, model: keras.Model, variables: Sequence[keras.Variable]) -> None:
        self._model, self._seed = model, global_seed()
        self._known = set(map(id, variables))
        self._variables = [*variables, *([] if self._seed is None else [self._seed.state])]

    def restore(self) -> None:
        """Reset metrics that were created since, and restore the global seed generator."""
        for metric in self._model.metrics:
            if not {id(variable) for variable in metric.variables} <= self._known:
                metric.reset_state()
        set_global_seed(self._seed)


class OtherVariables:
    """Variables of user code that no snapshot of the model has, such as those of its losses.

    Eager code may write to any variable, so each value is recorded before its first assignment.

    Args:
        known: other variables that the caller restores itself.
    """

    def __init__(
        self, model: keras.Model, backend: Backend, known: Iterable[keras.Variable] = ()
    ) -> None:
        of_model = state_variables(model, backend.optimizers(), with_weights=True)
        self._known = {id(variable) for variable in (*of_model, *known)}
        self._values: list[tuple[keras.Variable, Tensor]] = []
        self._classes = [] if backend.traces else [keras.Variable]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this thread's eager code assigns to, and restore it at the end."""
        with _assignments.of(self._classes), _recording.set(self):
            try:
                yield
            finally:
                self.restore()

    def note(self, variable: keras.Variable) -> None:
        """Record the value of a variable that is not known yet."""
        if id(variable) not in self._known and stateless_scope() is None:
            self._known.add(id(variable))
            self._values.append((variable, copy_of(variable)))

    def restore(self) -> None:
        """Restore the recorded values."""
        for variable, value in self._values:
            variable.assign(value)


_recording = ThreadValue()  # the `OtherVariables` of this thread, or None


def _recorded(_: object, assign: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def record(variable: keras.Variable, value: Tensor) -> Tensor:
        if (others := _recording.get()) is not None:
            others.note(variable)
        return assign(variable, value)

    return record


_assignments = MethodPatch("assign", _recorded)
