"""Snapshots of the variables that steps write to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import keras

from ga_model.base._identity import unique
from ga_model.base._internals import (
    global_seed,
    layer_state,
    layers_in,
    seeds,
    set_global_seed,
)


def state_variables(
    model: keras.Model, optimizers: Iterable[keras.optimizers.Optimizer], with_weights: bool = False
) -> list[keras.Variable]:
    """Return the variables that a model's steps write to.

    Args:
        optimizers: the optimizers of the model.
        with_weights: whether to include all weights, and not only state of layers and metrics.
    """
    variables = [v for layer in layers_in(model) for v in (*layer_state(layer), *seeds(layer))]
    if with_weights:
        variables = [*model.variables, *variables]
    of_optimizers = [v for optimizer in optimizers for v in optimizer.variables]
    numbers = [v for v in of_optimizers if len(v.shape) == 0]  # such as the learning rate
    return unique([*variables, *numbers, *model.metrics_variables])


class VariableSnapshot:
    """A snapshot of variables, whose values a subclass keeps, and of Keras's global seed generator.

    Args:
        variables: result of `state_variables`.
    """

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
