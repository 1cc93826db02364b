"""A loop in the graph that carries a nest of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def loop(add: Callable[[Any, Any], Any], first: Any, times: Any) -> Any:
    """Return `add(n - 1, ... add(2, add(1, first)))` for n `times`, one after the other.

    Args:
        add: function of an index, int64 scalar tensor, and what it returned the time before.
        first: a nest of tensors and None. A list of tensors of any shape is one tensor.
        times: int64 scalar tensor, at least 1.
    """

    def flat(nest: Any) -> list[Any]:
        return [leaf for leaf in tf.nest.flatten(nest) if leaf is not None]

    def packed(tensors: list[Any]) -> Any:
        leaves = iter(tensors)
        return tf.nest.map_structure(lambda leaf: None if leaf is None else next(leaves), first)

    # A loop starts with what is there already: without the dependency, the second microbatch's
    # activations would be there together with the first one's.
    with tf.control_dependencies(flat(first)):
        one = tf.identity(tf.ones((), tf.int64))
    _, tensors = tf.while_loop(
        lambda index, _: index < times,
        lambda index, tensors: (index + 1, flat(add(index, packed(tensors)))),
        (one, flat(first)),
        # Said so, because less may be known of what a function in the loop returns.
        shape_invariants=(tf.TensorShape(()), [tensor.shape for tensor in flat(first)]),
        parallel_iterations=1,  # or the activations of ten microbatches are there at a time
    )
    return packed(tensors)
