"""Snapshots of the variables that a step writes to."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from ga_model.backends.tensorflow.replicas import copies
from ga_model.base._internals_tf import value_of
from ga_model.core.snapshots import VariableSnapshot


class State(VariableSnapshot):
    """A snapshot of variables of Keras, on all replicas of this machine."""

    def __init__(self, model: keras.Model, variables: Sequence[keras.Variable]) -> None:
        super().__init__(model, variables)
        self._values = Variables(self._variables)

    def restore(self) -> None:
        self._values.restore()
        super().restore()


class Variables:
    """Variables, and their values when first noted.

    A value shares the variable's memory until the variable is written.
    """

    def __init__(self, variables: Iterable[keras.Variable | tf.Variable] = ()) -> None:
        self._values: dict[int, tuple[tf.Variable, tf.Tensor]] = {}
        self.note(variables)

    def note(self, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        """Record the values of variables that are not known yet."""
        for copy in (copy for variable in variables for copy in copies(variable)):
            if id(copy) not in self._values:
                self._values[id(copy)] = copy, value_of(copy)

    def written(self) -> list[str]:
        """Return the names of the variables whose values have changed."""
        return [
            variable.name
            for variable, value in self._values.values()
            if not np.array_equal(value_of(variable), value, equal_nan=value.dtype.is_floating)
        ]

    def restore(self) -> None:
        """Restore all values."""
        for variable, value in self._values.values():
            variable.assign(value)


def other_variables(known: Iterable[keras.Variable | tf.Variable]) -> Variables:
    """Return the values of all variables of the process, except known and frozen (`gc`) ones.

    Eagerly, a step may use any variable, for example by a global name.
    """
    left_out = {id(copy) for variable in known for copy in copies(variable)}
    living = [value for value in gc.get_objects() if issubclass(type(value), tf.Variable)]
    every = (copy for variable in living for copy in copies(variable))
    return Variables(copy for copy in every if id(copy) not in left_out and _has_value(copy))


def _has_value(variable: tf.Variable) -> bool:
    handle = getattr(variable, "handle", None)  # variables in a graph may have none
    return handle is not None and not tf.is_symbolic_tensor(handle) and variable.is_initialized()
