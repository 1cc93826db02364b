"""What tensors of a graph follow from, also through the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ga_model.base._internals_tf import written_handles
from ga_model.reading._inner_graphs import BRANCHES, LOOPS, bodies
from ga_model.reading._operations import names

_CALLS = names("PartitionedCall StatefulPartitionedCall")


def walk_back(
    tensors: Iterable[Any], graph: Any, goes_on: Callable[[Any], bool] = lambda tensor: True
) -> list[Any]:
    """Return the tensors of a graph that others follow from, and these, each once.

    Args:
        tensors: where to begin. What is not of the graph is left out.
        graph: the graph.
        goes_on: function of a tensor that tells whether to go on to what it was computed from.
    """
    found: dict[int, Any] = {}
    left = list(tensors)
    while left:
        tensor = left.pop()
        is_here = tf.is_symbolic_tensor(tensor) and tensor.graph is graph
        if is_here and id(tensor) not in found:
            found[id(tensor)] = tensor
            left += _inputs(tensor) if goes_on(tensor) else []
    return list(found.values())


def _inputs(tensor: Any) -> list[Any]:
    """Return what a tensor is computed from, as far as that is known."""
    op = tensor.op
    graphs = bodies(op) if op.type in _CALLS else []
    if len(graphs) != 1:
        return list(op.inputs)
    return _passed_in(op, graphs[0], graphs[0].outputs[tensor.value_index :][:1])


def _passed_in(op: Any, graph: Any, tensors: Iterable[Any]) -> list[Any]:
    """Return the inputs of an operation that tensors of a graph which it runs follow from."""
    found = {id(tensor) for tensor in walk_back(tensors, graph)}
    return [outer for outer, own in zip(_arguments(op), graph.inputs) if id(own) in found]


def _arguments(op: Any) -> list[Any]:
    """Return what an operation passes to the graphs that it runs."""
    return list(op.inputs)[op.type in BRANCHES :]


def written_from(op: Any, handle: Any) -> list[Any]:
    """Return what the value that an operation writes to a variable follows from.

    Args:
        op: the operation.
        handle: of the variable, as an input of the operation. It is returned itself if the value
            before is known to enter, or nothing is known.
    """
    if op.type == "AssignVariableOp":
        return [op.inputs[1]]
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
                found += _passed_in(op, graph, written_from(part, inner))
    return found
