"""Private names of TensorFlow, and of Keras on it: see `_internals`."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import reduce_per_replica
from tensorflow.python.eager import execute, forwardprop_util, record
from tensorflow.python.framework import op_callbacks, ops
from tensorflow.python.framework.auto_control_deps_utils import (
    RESOURCE_READ_OPS,
    get_read_write_resource_inputs,
)

# The `experimental_attributes` of a `tf.function` that is called and not inlined.
NOT_INLINED = {"_noinline": True}

# What the names of attributes begin with in which TensorFlow notes what an object holds.
OF_TRACKING = "_self_"

# Tapes and graphs.


def is_followed(tensor: Any) -> bool:
    """Return whether a tape follows a tensor."""
    return bool(record.should_record_backprop([tensor]))


def unseen_by_tapes() -> Any:
    """Return the context in which no tape of this thread sees what is computed."""
    return record.stop_recording()


def record_on_tapes(
    name: str, outputs: list[Any], sources: list[Any], gradient: Callable[..., Any]
) -> None:
    """Let tapes take the gradient of outputs with respect to sources by a function.

    Args:
        name: of the operation.
        outputs, sources: tensors.
        gradient: takes gradients with respect to the outputs, and returns those of the sources.
    """
    record.record_operation(name, outputs, sources, gradient)


def has_forward_derivatives(tensors: list[Any]) -> bool:
    """Return whether a `tf.autodiff.ForwardAccumulator` follows one of several tensors."""
    return bool(forwardprop_util.pack_tangents(tensors).tangents)


def has_own_gradient(op: tf.Operation) -> bool:
    """Return whether the gradients of an operation are computed by a rule of the user's."""
    if op.type == "IdentityN":
        return own_gradient_of(op) is not None
    names = {attribute for attribute in op.node_def.attr if attribute == "_gradient_op_type"}
    return bool(names) and not op.type.endswith("PartitionedCall")


def own_gradient_of(op: tf.Operation) -> Callable[..., Any] | None:
    """Return what computes the gradients of an operation, where a `tf.custom_gradient` does.

    None for those of TensorFlow's and Keras's functions. `tests/reading/test_custom_gradients.py`.
    """
    try:
        name = op.get_attr("_gradient_op_type").decode()
    except ValueError:  # it has none
        return None
    function = inspect.unwrap(ops.gradient_registry.lookup(name))
    inner = function
    for held in ("tape_grad_fn", "grad_fn"):
        inner = inspect.getclosurevars(inner).nonlocals.get(held, inner)
    is_own = (inner.__module__ or "").startswith(("tensorflow.", "keras."))
    return None if is_own else lambda *upstream: function(op, *upstream)


def has_custom_gradient(op: tf.Operation) -> bool:
    """Return whether an operation has the results of a `tf.custom_gradient`, also TensorFlow's."""
    return "_gradient_op_type" in op.node_def.attr


def written_handles(op: tf.Operation) -> list[Any]:
    """Return the handles of the variables that an operation writes to."""
    return list(get_read_write_resource_inputs(op)[1])


# Operations that draw other numbers each time that they run.
_DRAWS = re.compile(
    "Random(?!.*Dataset)|Stateful(Uniform|Standard|Truncated|Random)|TruncatedNormal|Multinomial"
    "|ParameterizedTruncatedNormal|RngReadAndSkip|SampleDistorted"
)


def stateful_draws(graph: Any) -> list[str]:
    """Return the types of operations in a graph and its functions that draw unseeded numbers."""
    nodes = [op.node_def for op in graph.get_operations()]
    nodes += [node for f in graph.as_graph_def().library.function for node in f.node_def]
    return sorted({node.op for node in nodes if _DRAWS.match(node.op)})


def graph_of_function(graph: Any, name: str) -> Any:
    """Return the graph of a function that a graph calls by its name, or None."""
    return getattr(graph._get_function(name), "graph", None)


# Operations, while they are made in a graph or run.


@contextlib.contextmanager
def seeing_operations(see: Callable[[str, Sequence[Any], Sequence[Any]], Any]) -> Iterator[None]:
    """Look at the operations that are made in the present graph in a block, or run eagerly.

    Those of branches, loops and functions in the graph are not seen.

    Args:
        see: takes the type of an operation, its inputs and its outputs, tensors; returns what takes
            the place of the outputs, or None.
    """
    graph = None if tf.executing_eagerly() else ops.get_default_graph()

    def in_graph(
        name: str,
        inputs: Any,
        attributes: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> Any:
        if graph is None or graph is not outermost:
            return outputs
        others = see(name, inputs, outputs)
        return outputs if others is None else others

    outermost, now = graph, execute.execute
    op_callbacks.add_op_callback(in_graph)  # so that everything runs by `execute.execute`
    if graph is None:
        execute.execute = _seen_by(see)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(in_graph)
        execute.execute = now


def _seen_by(see: Callable[[str, Sequence[Any], Sequence[Any]], Any]) -> Callable[..., Any]:
    is_looking = False

    def run(op: Any, number: int, inputs: Any, attrs: Any, ctx: Any, name: Any = None) -> Any:
        nonlocal is_looking
        outputs = execute.quick_execute(op, number, inputs, attrs, ctx, name)
        if is_looking:
            return outputs
        is_looking = True
        try:
            others = see(op.decode() if isinstance(op, bytes) else op, inputs, outputs)
        finally:
            is_looking = False
        return outputs if others is None else others

    return run


@contextlib.contextmanager
def noting_writes(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Note those of several variables that are written to in a block."""
    handles = {id(variable.handle): variable for variable in variables}
    found: dict[int, Any] = {}

    def note(handle: Any) -> None:
        if id(handle) in handles:
            found[id(handle)] = handles[id(handle)]

    def see(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        if name not in RESOURCE_READ_OPS:
            for value in inputs:
                note(value)

    written: list[Any] = []
    if tf.executing_eagerly():
        with seeing_operations(see):
            yield written
    else:
        graph = ops.get_default_graph()
        number = len(graph.get_operations())
        yield written
        outer = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        for op in graph.get_operations()[number:]:
            for handle in get_read_write_resource_inputs(op)[1]:
                note(outer.get(id(handle), handle))
    written += found.values()


# Replicas.


def copy_on_replica(variable: Any) -> Any:
    """Return the copy of a distributed variable that belongs to the replica that runs."""
    return variable._get()


def logs_over_replicas(logs: Any, strategy: Any) -> Any:
    """Return logs as Keras makes one of those of all replicas."""
    return reduce_per_replica(logs, strategy, "auto")
