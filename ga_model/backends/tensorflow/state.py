"""What a step writes to, as it is at one time."""

from __future__ import annotations

from typing import Any

from ga_model.base._identity import unique
from ga_model.base._internals import (
    global_seed,
    layers_in,
    own_state,
    raw,
    seeds,
    set_global_seed,
)
from ga_model.hearing._models import optimizers_in


class State:
    """The values of variables that steps write to, and of the numbers that optimizers keep.

    A value shares its memory with the variable until that is written to.

    Args:
        model: the model.
        with_weights: whether all of its weights are among them. Else they are what layers and
            metrics keep.
    """

    def __init__(self, model: Any, with_weights: bool = False) -> None:
        self._model = model
        variables = [v for layer in layers_in(model) for v in (*own_state(layer), *seeds(layer))]
        if with_weights:
            variables = [*model.variables, *variables]
        of_optimizers = [v for o in optimizers_in(vars(model)) for v in o.variables]
        numbers = [v for v in of_optimizers if len(v.shape) == 0]  # such as the rate
        self._variables = unique([*variables, *numbers, *model.metrics_variables])
        self._values = [raw(variable).read_value() for variable in self._variables]
        self._seed = global_seed()
        self._seed_value = None if self._seed is None else raw(self._seed.state).read_value()

    def put_back(self) -> None:
        """Let all be as it was. Metrics that were created since start again."""
        for variable, value in zip(self._variables, self._values):
            raw(variable).assign(value)
        known = set(map(id, self._variables))
        for metric in self._model.metrics:
            if not {id(variable) for variable in metric.variables} <= known:
                metric.reset_state()
        set_global_seed(self._seed)
        if self._seed is not None:
            raw(self._seed.state).assign(self._seed_value)
