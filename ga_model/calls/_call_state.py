"""What calls of layers read and write besides their arguments, and how it is restored.

Variables here; the attributes of layers, and the random numbers of Python: `base._call_again`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from ga_model.base._context import graph_being_made
from ga_model.base._identity import is_in, unique
from ga_model.base._internals import assign, layers_in, own_state, raw, seeds
from ga_model.replicas import _strategy


def read(variables: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of variables and the values that they have, whatever a scope says."""
    return [(variable, tf.identity(raw(variable))) for variable in variables]


def write(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Write values to variables, whatever a scope says."""
    for variable, value in pairs:
        raw(variable).assign(value)


def state_of(layer: Any) -> list[Any]:
    """Return what a call of a layer may change: seeds, statistics, counters, metrics.

    Not among them are frozen weights, which may be large; nor with several replicas what these
    would have to exchange.
    """
    layers = layers_in(layer)
    variables = [variable for part in layers for variable in own_state(part)]
    variables += [seed for part in layers for seed in seeds(part)]
    variables += getattr(layer, "metrics_variables", [])
    if _strategy.num_replicas() > 1:
        variables = [v for v in variables if v.aggregation in (None, "none")]
    return unique(variables)


class EagerScope(keras.StatelessScope):
    """A scope that keeps variables from being written, and forgets what inner graphs write.

    That is a tensor of theirs, which is of no use outside.
    """

    def add_update(self, update: tuple[Any, Any]) -> None:
        if not tf.is_symbolic_tensor(update[1]):
            super().add_update(update)


class NotingScope(keras.StatelessScope):
    """A scope that keeps nothing from being written, and notes what was there before.

    Args:
        values: pairs of a variable and the value that is read from it.
        noted: variables that are noted in any case. Functions that were traced before do not tell
            what they write to.

    Attributes:
        found: pairs of a variable and the value that it had before it was written to.
        written: variables that were written to, as far as that shows.
        is_inner: whether an outer scope keeps everything from being written.
    """

    def __init__(self, values: Iterable[tuple[Any, Any]] = (), noted: Iterable[Any] = ()) -> None:
        super().__init__(list(values), collect_losses=True)
        self.found = read(noted)
        self.written: list[Any] = []
        self._graph = graph_being_made()

    @property
    def is_inner(self) -> bool:
        return self.original_scope is not None

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        self.written.append(variable)
        if not is_in(variable, [other for other, _ in self.found]):
            # In the graph of the call, also where a loop or a branch in it writes.
            with tf.init_scope() if self._graph is None else self._graph.as_default():
                self.found += read([variable])
        if self.is_inner:
            super().add_update(update)
        else:
            assign(variable, value)
