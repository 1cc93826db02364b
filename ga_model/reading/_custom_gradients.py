"""Custom gradients of layers (`tf.custom_gradient`).

The gradients of a loss are linear in what is passed back through its operations. So microbatches
can be weighed after their gradients are taken. A custom rule need not be linear: one that
clips what it gets clips other values of a microbatch than of the full batch, of whose loss each
sample is a smaller share. Samples may even meet in it, as in the norm of what it gets, or in its
mean, which is linear and another one of a microbatch all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ga_model.base._identity import is_in
from ga_model.base._internals_tf import has_custom_gradient, own_gradient_of
from ga_model.reading._dependence import dependence_of
from ga_model.reading._following import walk_back
from ga_model.reading._heard_gradients import OF_SHAPE, Work, work_by
from ga_model.reading._inner_graphs import bodies
from ga_model.reading._operations import BY_SAMPLE, ELEMENTWISE, MEAN, MIXED, SHARED, SUM
from ga_model.reading._reading import Reading


def not_additive(graph: Any) -> Any | None:
    """Return the first operation of a graph whose own gradients are not known to add up.

    They do if they are linear, and the gradient of a sample follows from that sample.
    """
    return next((op for op, _ in _not_additive(graph)), None)


def mixing(graph: Any) -> Any | None:
    """Return the first of these whose gradient may compute with several samples."""
    return next((op for op, may_mix in _not_additive(graph) if may_mix), None)


def reading_variables(graph: Any) -> Any | None:
    """Return the first result of a `tf.custom_gradient` whose function reads variables itself.

    TensorFlow gives these gradients to variables only, and not to values that take their place.
    """
    for op in graph.get_operations():
        if op.type == "IdentityN" and has_custom_gradient(op):
            result, *passed = op.inputs  # the function's results, what it gets, and variables
            found = walk_back([result], graph, functools.partial(_is_none_of, passed))
            if any(tensor.dtype == tf.resource for tensor in found):
                return op
    return None


def _is_none_of(tensors: list[Any], tensor: Any) -> bool:
    return not is_in(tensor, tensors)


def _not_additive(graph: Any) -> Iterator[tuple[Any, bool]]:
    """Yield operations, each with whether its gradient may compute with several samples.

    Also those of functions that operations call.
    """
    for op in graph.get_operations():
        if op.type.endswith("PartitionedCall"):
            for inner in bodies(op):
                yield from _not_additive(inner)
        if op.type == "IdentityN" and (gradient := own_gradient_of(op)) is not None:
            try:
                drawn, sources = _drawn(op, gradient)
            except Exception:  # of the user's code, called in a way that it may not know
                yield op, True
                continue
            is_linear, is_elementwise = _read(drawn, len(op.outputs))
            mixes = _mixes(drawn, op.outputs, sources)
            if mixes or not is_linear:
                yield op, mixes or not is_elementwise


def _drawn(op: Any, gradient: Any) -> tuple[Any, list[Any]]:
    """Return the graph of a gradient, and the inputs of the operation that it is with respect to.

    The arguments of the graph are gradients with respect to the outputs of the operation.
    """
    sources: list[Any] = []

    def drawn(*upstream: Any) -> list[Any]:
        found = tf.nest.flatten(gradient(*upstream), expand_composites=True)
        sources[:] = [source for source, tensor in zip(op.inputs, found) if tensor is not None]
        return [tensor for tensor in found if tensor is not None]

    specs = [tf.TensorSpec(output.shape, output.dtype) for output in op.outputs]
    with op.graph.as_default():
        graph = tf.function(drawn, autograph=False).get_concrete_function(*specs).graph
    return graph, sources


def _read(graph: Any, number: int) -> tuple[bool, bool]:
    """Return whether a gradient is linear, and whether it takes entry by entry.

    Args:
        graph: that it is drawn in.
        number: of the arguments.
    """
    works = {id(tensor): Work() for tensor in graph.inputs[:number]}
    is_elementwise = True
    for made in graph.get_operations():
        inputs = [works.get(id(tensor)) for tensor in made.inputs]
        known = [work for work in inputs if work is not None]
        if not known or made.type in OF_SHAPE:
            continue
        is_elementwise = is_elementwise and made.type in ELEMENTWISE
        is_gradient = made.type.endswith("Grad") or "Backprop" in made.type
        if is_gradient and len(known) == 1:  # those of TensorFlow's operations are linear
            work = known[0]
        else:
            work = work_by(made, inputs, [work is None for work in inputs])
        works.update({id(output): work for output in made.outputs})
    return all(works.get(id(t), Work()) == Work() for t in graph.outputs), is_elementwise


def _mixes(graph: Any, outputs: Any, sources: list[Any]) -> bool:
    """Return whether the gradient of a sample is known to follow from others.

    Args:
        graph: that the gradient is drawn in.
        outputs: of the operation, whose gradients are the arguments of the graph.
        sources: what the outputs of the graph are gradients with respect to.
    """
    given = [*outputs, *(outer for outer, _ in graph.captures)]
    kinds = [BY_SAMPLE if _has_samples(tensor) else SHARED for tensor in given]
    reading = Reading(graph, trusts_layers=True, arguments=kinds)
    return any(
        _has_samples(source) and reading.kind_of(tensor) in (MIXED, MEAN, SUM)
        for source, tensor in zip(sources, graph.outputs)
    )


def _has_samples(tensor: Any) -> bool:
    """Return whether a tensor most probably has samples: whether it follows from data."""
    return bool(tensor.shape.rank and dependence_of(tensor).on_values)
