"""Snapshots of the variables that a step writes to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ga_model.backends.tensorflow.replicas import copies
from ga_model.base._internals_tf import value_of
from ga_model.core.kept_state import KeptState


class State(KeptState):
    """The values of variables. Each shares the variable's memory until that is written to."""

    def _keep(self, variables: list[Any]) -> None:
        every = [copy for variable in variables for copy in copies(variable)]
        self._values = [(copy, value_of(copy)) for copy in every]

    def _put_values_back(self) -> None:
        for copy, value in self._values:
            copy.assign(value)


class Variables:
    """The values of variables that a step uses, in the model or elsewhere, when first noted."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, Any]] = {}

    def note(self, variables: Iterable[Any]) -> None:
        """Note those that are not known yet."""
        for variable in variables:
            if id(variable) not in self._values:
                self._values[id(variable)] = variable, variable.read_value()

    def put_back(self) -> None:
        """Restore all values."""
        for variable, value in self._values.values():
            variable.assign(value)
