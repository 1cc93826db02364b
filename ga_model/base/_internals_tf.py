"""Private names of TensorFlow, and of Keras on it: see `_internals`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import reduce_per_replica
from tensorflow.python.eager import forwardprop_util, record
from tensorflow.python.framework import ops
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

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


def graph_of_function(graph: Any, name: str) -> Any:
    """Return the graph of a function that a graph calls by its name, or None."""
    return getattr(graph._get_function(name), "graph", None)


# Replicas.


def copy_on_replica(variable: Any) -> Any:
    """Return the copy of a distributed variable that belongs to the replica that runs."""
    return variable._get()


def logs_over_replicas(logs: Any, strategy: Any) -> Any:
    """Return logs as Keras makes one of those of all replicas."""
    return reduce_per_replica(logs, strategy, "auto")
