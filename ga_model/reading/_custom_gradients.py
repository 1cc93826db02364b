"""Custom gradients of layers (`tf.custom_gradient`).

The gradients of a loss are linear in what is passed back through its operations. So microbatches
can be weighed after their gradients are taken. A custom rule need not be linear: one that
clips what it gets clips other values of a microbatch than of the full batch, of whose loss each
sample is a smaller share. Samples may even meet in it, as in the norm of what it gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from ga_model.base._internals_tf import own_gradient_of
from ga_model.reading._heard_gradients import OF_SHAPE, Work, work_by
from ga_model.reading._operations import ELEMENTWISE


def not_linear(graph: Any) -> Any | None:
    """Return the first operation of a graph whose own gradient is not known to be linear."""
    return next((op for op, _ in _not_linear(graph)), None)


def mixing(graph: Any) -> Any | None:
    """Return the first of these whose gradient may compute with several samples."""
    return next((op for op, is_elementwise in _not_linear(graph) if not is_elementwise), None)


def _not_linear(graph: Any) -> Iterator[tuple[Any, bool]]:
    """Yield operations, each with whether its gradient takes entry by entry."""
    for op in graph.get_operations():
        if op.type == "IdentityN" and (gradient := own_gradient_of(op)) is not None:
            is_linear, is_elementwise = _read(op, gradient)
            if not is_linear:
                yield op, is_elementwise


def _read(op: Any, gradient: Any) -> tuple[bool, bool]:
    """Return whether a gradient is linear, and whether it takes entry by entry."""

    def drawn(*upstream: Any) -> list[Any]:
        found = tf.nest.flatten(gradient(*upstream), expand_composites=True)
        return [tensor for tensor in found if tensor is not None]

    specs = [tf.TensorSpec(output.shape, output.dtype) for output in op.outputs]
    try:
        graph = tf.function(drawn, autograph=False).get_concrete_function(*specs).graph
    except Exception:  # of the user's code, called in a way that it may not know
        return False, False
    works = {id(tensor): Work() for tensor in graph.inputs[: len(specs)]}
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
