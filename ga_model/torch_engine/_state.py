"""What a microbatch changes beside gradients, and how it is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ga_model.base._internals import layers_in, own_state, raw, seeds, times_written


class Snapshot:
    """The values of all variables of a model but the weights that are trained, and of its metrics.

    Args:
        model: the model.
        of_layers: whether frozen weights are left out, which layers do not write to.
    """

    def __init__(self, model: Any, of_layers: bool = False) -> None:
        trained = {id(variable) for variable in model.trainable_weights}
        self._model = model
        variables = model.variables
        if of_layers:
            variables = [v for part in layers_in(model) for v in (*own_state(part), *seeds(part))]
        self._variables = {
            id(v): v for v in (*variables, *model.metrics_variables) if id(v) not in trained
        }
        self._values = {key: v.value.detach().clone() for key, v in self._variables.items()}

    def restore(self) -> None:
        """Give them back. What has come into being since begins anew."""
        for key, variable in self._variables.items():
            variable.assign(self._values[key])
        for metric in self._model.metrics:
            if not {id(variable) for variable in metric.variables} <= set(self._values):
                metric.reset_state()


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Leave the state of a model as it was before a block."""
    snapshot = Snapshot(model)
    try:
        yield
    finally:
        snapshot.restore()


def clear_gradients(model: Any) -> None:
    """Leave no gradient at the weights of a model."""
    for variable in model.trainable_weights:
        raw(variable).grad = None


class Writes:
    """What a step writes to: variables are compared before and after it.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        layers = layers_in(model)
        normalization = model._batch_normalization_layers()
        expected = [v for layer in normalization for v in layer.variables]
        expected += [state for layer in layers for state in seeds(layer)]
        known = {id(v) for v in (*expected, *model.metrics_variables)}
        trained = model.trainable_weights
        known |= {id(v) for v in trained}
        self._others = [(v, _version(v)) for v in model.variables if id(v) not in known]
        self._trained = [(v, _version(v)) for v in trained]

    def others(self) -> list[str]:
        """Return the paths of variables that were written to, and are to be once per update."""
        return [v.path for v, version in self._others if _version(v) != version]

    def has_trained(self) -> bool:
        """Return whether weights were updated."""
        return any(_version(v) != version for v, version in self._trained)


def _version(variable: Any) -> int:
    """Return a number that grows when a variable is written to."""
    return times_written(raw(variable))
