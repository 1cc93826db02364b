"""Snapshots of the variables that a step writes to."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from ga_model.backends.tensorflow.replicas import copies
from ga_model.base._internals_tf import value_of
from ga_model.core.snapshots import VariableSnapshot


class State(VariableSnapshot):
    """The values of variables. Each shares the variable's memory until the variable is written."""

    def __init__(self, model: keras.Model, variables: Sequence[keras.Variable]) -> None:
        super().__init__(model, variables)
        every = [copy for variable in self._variables for copy in copies(variable)]
        self._values = [(copy, value_of(copy)) for copy in every]

    def restore(self) -> None:
        for copy, value in self._values:
            copy.assign(value)
        super().restore()


class Variables:
    """Variables that a step uses, in the model or elsewhere, and their values when first noted."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[tf.Variable, tf.Tensor]] = {}

    def note(self, variables: Iterable[tf.Variable]) -> None:
        """Record the values of variables that are not known yet."""
        for variable in variables:
            if id(variable) not in self._values:
                self._values[id(variable)] = variable, variable.read_value()

    def restore(self) -> None:
        """Restore all values."""
        for variable, value in self._values.values():
            variable.assign(value)


def other_variables(known: Iterable[keras.Variable | tf.Variable]) -> Variables:
    """Return the values of all variables of the process, except known and frozen (`gc`) ones.

    Eagerly, a step may use any variable, for example by a global name. TensorFlow copies a value
    only when its variable changes.
    """
    left_out = {id(copy) for variable in known for copy in copies(variable)}
    living = [value for value in gc.get_objects() if issubclass(type(value), tf.Variable)]
    variables = {id(copy): copy for variable in living for copy in copies(variable)}
    values = Variables()
    values.note(v for key, v in variables.items() if key not in left_out and _has_value(v))
    return values


def _has_value(variable: tf.Variable) -> bool:
    handle = getattr(variable, "handle", None)  # variables in a graph may have none
    return handle is not None and not tf.is_symbolic_tensor(handle) and variable.is_initialized()
