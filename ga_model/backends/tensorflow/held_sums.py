"""Variables that hold the dense sums of gradients of an open window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ga_model.base._context import ThreadValue


class HeldSums:
    """Variables for sums. Each is written as soon as its gradient is computed.

    Attributes:
        present: the sums of the function that runs, with variables for dense ones.
    """

    def __init__(self) -> None:
        self._variables: dict[Any, tf.Variable] = {}
        self.present = ThreadValue(())

    def hold(self, sums: Iterable[Any]) -> list[Any]:
        """Return sums of gradients, the dense ones in variables."""
        found = list(sums)
        for place, value in enumerate(found):
            if isinstance(value, tf.Tensor):
                found[place] = self._variable(place, value)
                found[place].assign(value)
        return found

    def _variable(self, place: int, spec: Any) -> tf.Variable:
        """Return the variable that holds sums of a shape."""
        key = place, tuple(spec.shape), spec.dtype
        if key not in self._variables:
            self._variables[key] = tf.Variable(nothing(spec), trainable=False)
        return self._variables[key]

    def variables_of(self, specs: Iterable[Any]) -> list[Any]:
        """Return variables for the dense sums of these specs, and initial sums for others."""
        return [
            self._variable(place, spec)
            if isinstance(spec, (tf.Tensor, tf.TensorSpec))
            else tf.nest.map_structure(nothing, spec)
            for place, spec in enumerate(specs)
        ]

    def fill(self, sums: Iterable[Any], zero: Any) -> None:
        """Fill the variables among sums with a scalar, one by one to save memory."""
        before: list[Any] = []
        for variable in sums:
            if isinstance(variable, tf.Variable):
                with tf.control_dependencies(before):
                    # No constant, which the function would keep.
                    filled = tf.fill(variable.shape, tf.cast(zero, variable.dtype))
                    before = [variable.assign(filled)]


def nothing(spec: Any) -> Any:
    """Return the initial sum, -0.0, to which adding a zero keeps its sign."""
    if spec is None:
        return None
    if spec.dtype.is_floating:
        return tf.fill(spec.shape, tf.constant(-0.0, spec.dtype))
    return tf.zeros(spec.shape, spec.dtype)
