"""When a step updates weights, and what it computes with them afterwards.

On the full batch these are updated by then. A window updates all at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ga_model.base._internals import written_by_updates
from ga_model.hearing import _messages
from ga_model.reading._writes import used_since


class _Update(NamedTuple):
    optimizer: Any
    variables: list[Any]
    first: int  # of the operations after it


class Updates:
    """The updates of one step, in their order.

    Args:
        model: the name of the model.
        graph: the graph in which the step runs, or None in eager mode, where nothing is found.
    """

    def __init__(self, model: str, graph: Any) -> None:
        self._model = model
        self._graph = graph
        self._made: list[_Update] = []
        self._is_told = False

    def add(self, optimizer: Any, variables: list[Any]) -> None:
        """Note an update that is made now."""
        first = 0 if self._graph is None else len(self._graph.get_operations())
        self._made.append(_Update(optimizer, variables, first))

    @property
    def first(self) -> int:
        """The number of operations in front of the first update."""
        return min((update.first for update in self._made), default=0)

    def by_optimizer(self) -> dict[int, int]:
        """Return the number of operations in front of each update, by the optimizer's id."""
        return {id(update.optimizer): update.first for update in self._made}

    def messages_of_gradients(self, optimizer: Any, gradients: Sequence[Any]) -> list[str]:
        """Return what to tell of gradients that follow from weights which are updated before."""
        return [
            _messages.order_message(self._model, update.optimizer.name, optimizer.name, names)
            for update, names in self._used_by(gradients)
        ]

    def messages_of_values(self, values: Sequence[Any]) -> list[str]:
        """Return what to tell of logs and of values of metrics that do, unless gradients did."""
        if self._is_told:
            return []
        return [
            _messages.late_values_message(self._model, update.optimizer.name, names)
            for update, names in self._used_by(values)
        ]

    def _used_by(self, tensors: Sequence[Any]) -> list[tuple[_Update, list[str]]]:
        if self._graph is None:
            return []
        found = []
        for update in self._made:
            written = [*update.variables, *written_by_updates(update.optimizer)]
            if names := used_since(self._graph, update.first, written, tensors):
                found.append((update, names))
        self._is_told = self._is_told or bool(found)
        return found
