"""What tensors of a graph follow from, also through the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ga_model.base._internals_tf import written_handles
from ga_model.reading._inner_graphs import BRANCHES, LOOPS, bodies
from ga_model.reading._operations import names

_ADDING = names("Add AddN AddV2 Cast Identity Sub")
_FOLLOWED = names("PartitionedCall StatefulPartitionedCall") | LOOPS


def walk_back(
    tensors: Iterable[Any], graph: Any, goes_on: Callable[[Any], bool] = lambda tensor: True
) -> list[Any]:
    """Return the tensors of a graph that others follow from, and these, each once.

    Args:
        tensors: where to begin. What is not of the graph is left out.
        graph: the graph.
        goes_on: function of a tensor that tells whether to go on to what it was computed from.
    """
    return list(_Walk(graph, goes_on).back(tensors))


class _Walk:
    """Follows tensors of one graph back, and through the graphs that its operations run.

    What was found in an inner graph is kept, so that each is walked through once, however many
    of its outputs are followed.
    """

    def __init__(self, graph: Any, goes_on: Callable[[Any], bool] = lambda tensor: True) -> None:
        self._graph = graph
        self._goes_on = goes_on
        self._found: dict[int, Any] = {}
        self._inner: dict[str, list[_Walk]] = {}

    def back(self, tensors: Iterable[Any]) -> Iterable[Any]:
        """Return all that was found so far, with what these tensors follow from."""
        left = list(tensors)
        while left:
            tensor = left.pop()
            is_here = tf.is_symbolic_tensor(tensor) and tensor.graph is self._graph
            if is_here and id(tensor) not in self._found:
                self._found[id(tensor)] = tensor
                left += self._inputs(tensor) if self._goes_on(tensor) else []
        return self._found.values()

    def passed_in(self, arguments: list[Any], tensors: Iterable[Any]) -> list[Any]:
        """Return those of a function's arguments that tensors of its graph follow from."""
        self.back(tensors)
        return [a for a, own in zip(arguments, self._graph.inputs) if id(own) in self._found]

    def _inputs(self, tensor: Any) -> list[Any]:
        """Return what a tensor is computed from, as far as that is known."""
        op = tensor.op
        graphs = bodies(op) if op.type in _FOLLOWED else []
        if len(graphs) != 1 + (op.type in LOOPS):
            return list(op.inputs)
        walks = self._inner.setdefault(op.name, [_Walk(graph) for graph in graphs])
        if op.type in LOOPS:
            return _carried(op, graphs, walks, tensor.value_index)
        output = graphs[0].outputs[tensor.value_index :][:1]
        return walks[0].passed_in(_arguments(op), output)


def _carried(op: Any, graphs: list[Any], walks: list[_Walk], number: int) -> list[Any]:
    """Return the inputs of a loop that one of its outputs follows from.

    An output is what the body makes of all that it follows from, which other runs of the body have
    made. The condition tells how often.
    """
    body, condition = graphs
    places = list(range(len(op.inputs)))
    found = {number, *walks[1].passed_in(places, condition.outputs)}
    while True:
        more = walks[0].passed_in(places, [body.outputs[place] for place in found])
        if found.issuperset(more):
            return [op.inputs[place] for place in sorted(found)]
        found.update(more)


def _arguments(op: Any) -> list[Any]:
    """Return what an operation passes to the graphs that it runs."""
    return list(op.inputs)[op.type in BRANCHES :]


def added_to_variable(value: Any) -> Any:
    """Return what is added to the value of a variable, or None if a tensor is no such sum."""
    op = getattr(value, "op", None)
    if op is None or op.type not in ("Add", "AddV2"):
        return None
    others = [tensor for tensor in op.inputs if tensor.op.type != "ReadVariableOp"]
    return others[0] if len(others) == 1 else None


def adds_to_variable(value: Any) -> bool:
    """Return whether a tensor is a sum of the value of a variable and something else."""
    left = [value]
    while left:
        op = left.pop().op
        if op.type == "ReadVariableOp":
            return True
        if op.type in _ADDING:
            left += list(op.inputs)[: 1 if op.type in ("Cast", "Sub") else None]
    return False


def written_from(op: Any, handle: Any) -> list[Any]:
    """Return what the value that an operation writes to a variable follows from.

    Args:
        op: the operation.
        handle: of the variable, as an input of the operation. It is returned itself if the value
            before is known to enter, or nothing is known.
    """
    if op.type == "AssignVariableOp":
        return [op.inputs[1]]
    if op.type in ("AssignAddVariableOp", "AssignSubVariableOp"):
        return [handle, op.inputs[1]]
    graphs = bodies(op)
    if not graphs or op.type in LOOPS:
        return [handle]
    chosen_by = list(op.inputs)[: op.type in BRANCHES]
    found = [tensor for tensor in chosen_by if tensor.op.type != "VarIsInitializedOp"]
    for graph in graphs:
        own = {id(own) for outer, own in zip(_arguments(op), graph.inputs) if outer is handle}
        writes = [(part, h) for part in graph.get_operations() for h in written_handles(part)]
        for part, inner in writes:
            if id(inner) in own:
                found += _Walk(graph).passed_in(_arguments(op), written_from(part, inner))
    return found
