"""What a tensor of a graph depends on: the values of the samples, or their number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# Of the operations with a state, these only read variables, which all samples share.
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarHandleOp")
_SHAPES = ("Shape", "ShapeN", "Size", "ZerosLike", "OnesLike")


class Dependence(NamedTuple):
    """What a tensor depends on.

    Attributes:
        on_values: whether on the values of the samples, or on random numbers.
        on_rows: whether on how many samples there are.
    """

    on_values: bool
    on_rows: bool


_ALL = Dependence(True, True)
_NOTHING = Dependence(False, False)


def dependence_of(tensor: Any) -> Dependence:
    """Return what a tensor depends on, as its graph tells; eagerly, on everything.

    The arguments of the `tf.function` that is traced are samples, and what it captures is not,
    unless it comes from such arguments itself. Axis 0 of a tensor holds samples, the other axes do
    not: `tf.shape(x)[1]` depends on neither. What a function, a loop or a branch returns depends on
    all. A number of samples that is known while the graph is made is not seen in it: see
    `is_made_for_rows`.
    """
    if not tf.is_symbolic_tensor(tensor):
        return _ALL
    on_values = on_rows = False
    seen: set[int] = set()
    left = [tensor]
    while left:
        tensor = left.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        own, inputs = _own(tensor)
        on_values, on_rows = on_values or own.on_values, on_rows or own.on_rows
        if on_values and on_rows:
            break
        left += inputs
    return Dependence(on_values, on_rows)


def _own(tensor: Any) -> tuple[Dependence, list[Any]]:
    """Return what an operation adds to the dependence of its inputs, and these inputs."""
    op = tensor.op
    if op.type == "Placeholder":
        captured = _captured(tensor)
        if captured is None:
            return _ALL, []
        is_shared = not tf.is_symbolic_tensor(captured) or captured.dtype == tf.resource
        return _NOTHING, [] if is_shared else [captured]
    if _is_source(op):
        return _ALL, []
    if op.type == "Rank" or _is_of_inner_axes(tensor):
        return _NOTHING, []
    if op.type in _SHAPES:
        measured = op.inputs[tensor.value_index if op.type == "ShapeN" else 0]
        return Dependence(False, any(dependence_of(measured))), []
    return _NOTHING, [value for value in op.inputs if value.dtype != tf.resource]


def _captured(placeholder: Any) -> Any:
    """Return the captured tensor of a placeholder, or None."""
    captures = getattr(placeholder.graph, "captures", [])
    return next((outer for outer, inner in captures if inner is placeholder), None)


def _is_source(op: Any) -> bool:
    """Return whether an operation fetches data, draws random numbers, or hides what it does."""
    definition = op.op_def
    calls = any("func" in attribute.type for attribute in definition.attr)
    draws = op.type.startswith("Stateless") or op.type == "PyFuncStateless"
    return calls or draws or (definition.is_stateful and op.type not in _READS)


def _is_of_inner_axes(tensor: Any) -> bool:
    """Return whether a tensor is a part of a shape without axis 0."""
    op = tensor.op
    if op.type not in ("StridedSlice", "Unpack"):
        return False
    shape = op.inputs[0]
    while shape.op.type in ("Cast", "Identity"):
        shape = shape.op.inputs[0]
    if shape.op.type != "Shape":
        return False
    if op.type == "Unpack":
        return bool(tensor.value_index > 0)
    begin, end, stride = (tf.get_static_value(value) for value in op.inputs[1:])
    rank = shape.shape[0]
    if begin is None or end is None or stride is None or rank is None:
        return False
    if op.get_attr("shrink_axis_mask"):
        return bool(begin[0] % rank)
    first = None if op.get_attr("begin_mask") else begin[0]
    last = None if op.get_attr("end_mask") else end[0]
    return 0 not in range(rank)[first : last : stride[0]]


def is_made_for_rows(ids: Any) -> bool:
    """Return whether a tensor that depends on nothing has an entry of axis 0 for each sample.

    Where their number is known while the graph is made, `tf.zeros_like(tokens)` is a constant, as
    a table of positions is. If axis 0 has that number, what is in it tells: what is for samples
    repeats itself for each, and what is not has different entries. For a single sample, what is for
    it is the same all over.
    """
    rows = ids.shape[0] if ids.shape.rank else None
    if rows is None or rows not in _static_rows(ids.graph):
        return False
    seen: set[int] = set()
    left = [ids]
    while left:
        tensor = left.pop()
        if id(tensor) in seen or not tensor.shape.rank or tensor.shape[0] != rows:
            continue
        seen.add(id(tensor))
        op = tensor.op
        if op.type in ("Const", "Placeholder"):
            captured = tensor if op.type == "Const" else _captured(tensor)
            value = tf.get_static_value(captured)
            if value is not None and _is_repeated(value):
                return True
        elif op.type == "Fill":
            return True
        elif op.type in ("BroadcastTo", "Tile", "Reshape"):
            source = op.inputs[0]
            is_new = op.type == "BroadcastTo" and source.shape.rank != tensor.shape.rank
            is_new = is_new or source.shape[:1] != [rows]
            if is_new if rows > 1 else op.type != "Reshape":
                return True
            left.append(source)
        else:  # the other inputs of the former say where, and are no ids
            left += op.inputs[:1] if op.type in ("StridedSlice", "ExpandDims") else op.inputs
    return False


def _static_rows(graph: Any) -> set[int]:
    """Return what is known of the number of samples while a graph is made."""
    tensors = [
        tensor
        for op in graph.get_operations()
        if op.type in ("Placeholder", "IteratorGetNext")
        for tensor in op.outputs
        if op.type != "Placeholder" or _captured(tensor) is None
    ]
    return {tensor.shape[0] for tensor in tensors if tensor.shape.rank} - {None}


def _is_repeated(value: np.ndarray) -> bool:
    if len(value) > 1:
        return bool(np.all(value == value[:1]))
    return value.ndim > 1 and bool(np.all(value == value.flat[0]))
