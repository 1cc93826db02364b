"""What a step writes to, as it is at one time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ga_model.backends.tensorflow.replicas import copies
from ga_model.base._identity import unique
from ga_model.base._internals import (
    global_seed,
    layers_in,
    own_state,
    seeds,
    set_global_seed,
)
from ga_model.base._internals_tf import value_of
from ga_model.core.models import optimizers_in


def kept_variables(model: Any, with_weights: bool = False) -> list[Any]:
    """Return the variables of a model that steps write to.

    Args:
        model: the model.
        with_weights: whether all of its weights are among them. Else they are what layers and
            metrics keep.
    """
    variables = [v for layer in layers_in(model) for v in (*own_state(layer), *seeds(layer))]
    if with_weights:
        variables = [*model.variables, *variables]
    of_optimizers = [v for o in optimizers_in(vars(model)) for v in o.variables]
    numbers = [v for v in of_optimizers if len(v.shape) == 0]  # such as the rate
    return unique([*variables, *numbers, *model.metrics_variables])


class State:
    """The values of variables that steps write to, and of the numbers that optimizers keep.

    A value shares its memory with the variable until that is written to.

    Args:
        model: the model.
        variables: what `kept_variables` has found.
    """

    def __init__(self, model: Any, variables: list[Any]) -> None:
        self._model, self._variables = model, variables
        self._seed = global_seed()
        of_seed = [] if self._seed is None else [self._seed.state]
        every = [copy for v in (*self._variables, *of_seed) for copy in copies(v)]
        self._values = [(copy, value_of(copy)) for copy in every]

    def put_back(self) -> None:
        """Let all be as it was. Metrics that were created since start again."""
        for copy, value in self._values:
            copy.assign(value)
        known = set(map(id, self._variables))
        for metric in self._model.metrics:
            if not {id(variable) for variable in metric.variables} <= known:
                metric.reset_state()
        set_global_seed(self._seed)


class Variables:
    """The values of variables that a step reaches, whoever has them, as they were when noted."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, Any]] = {}

    def note(self, variables: Iterable[Any]) -> None:
        """Note those that are not known yet."""
        for variable in variables:
            if id(variable) not in self._values:
                self._values[id(variable)] = variable, variable.read_value()

    def put_back(self) -> None:
        """Let all be as they were."""
        for variable, value in self._values.values():
            variable.assign(value)
