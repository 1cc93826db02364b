"""Build optimizers outside of graphs, and apply them to sums over replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ga_model.backends.tensorflow.replicas import copies, largest
from ga_model.base._types import Gradient
from ga_model.core.backend_types import Applied
from ga_model.core.window import Largest, Rows


def create_unseen(next_creator: Callable[..., tf.Variable], **settings: Any) -> tf.Variable:
    """Create a variable that `tf.function` does not notice, for `tf.variable_creator_scope`.

    It traces a function again if it notices that the first trace created variables.
    """
    with tf.init_scope():
        return next_creator(**{**settings, "experimental_enable_variable_lifting": False})


def build_outside(
    optimizer: keras.optimizers.Optimizer,
    build: Callable[..., None],
    variables: Sequence[keras.Variable],
    is_seen: bool = False,
) -> None:
    """Create the variables of an optimizer, by its `build`, outside of the present graph.

    With `is_seen`, `tf.function` notices the new variables and traces again.
    """
    unseen = contextlib.nullcontext() if is_seen else tf.variable_creator_scope(create_unseen)
    with (
        tf.init_scope(),
        unseen,
        keras.name_scope(optimizer.name, caller=optimizer),
    ):
        try:
            build(list(variables))
        except ValueError as error:  # the optimizer may start from values of the variables
            if all(map(_has_value, variables)):
                raise
            raise ValueError(_unbuilt_weights_message(optimizer.name)) from error


def _has_value(variable: keras.Variable) -> bool:
    return all(bool(copy.is_initialized()) for copy in copies(variable))


def as_applied(gradient: Gradient, variable: keras.Variable) -> tf.Tensor | tf.IndexedSlices | None:
    """Return the gradient of a variable in the form that optimizers accept."""
    if isinstance(gradient, Largest):
        return tf.cast(largest(gradient.values), variable.dtype)
    if not isinstance(gradient, Rows):
        return gradient
    shape = tf.constant(list(variable.shape), tf.int64)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def apply(applied: Applied, gradients: list[Gradient]) -> None:
    """Apply an optimizer on every replica to the sum over replicas of their gradients.

    An optimizer sums over replicas itself, but only after it has clipped the gradients of each
    replica, and after a LossScaleOptimizer has checked the first replica of each machine for
    overflows. Both must see the sum, so it is computed here: the first replica passes it on, the
    others zeros. With loss scaling, the others pass NaN where it is not finite. Otherwise machines
    would decide differently, and deadlock.
    """
    optimizer = applied.optimizer
    gradients = list(map(as_applied, gradients, applied.variables))
    is_scaled = hasattr(optimizer, "inner_optimizer")
    has_replicas = tf.distribute.get_strategy().num_replicas_in_sync > 1
    if has_replicas and (is_scaled or _clips(optimizer)):
        gradients = _sum_on_first_replica(gradients, shows_overflow=is_scaled)
    applied.reapply(gradients)


def _clips(optimizer: keras.optimizers.Optimizer) -> bool:
    clipping = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    parts = getattr(optimizer, "optimizers", ())  # of a MultiOptimizer
    return any(c is not None for c in clipping) or any(map(_clips, parts))


def _sum_on_first_replica(tensors: list[Gradient], shows_overflow: bool) -> list[Gradient]:
    """Return the sums over replicas on the first replica, and zeros on the others.

    With `shows_overflow`, the others get NaN where a sum is not finite.
    """
    context = tf.distribute.get_replica_context()
    present = [tensor for tensor in tensors if tensor is not None]
    is_first = tf.equal(context.replica_id_in_sync_group, 0)

    def here(tensor: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
        if isinstance(tensor, tf.IndexedSlices):
            return tf.IndexedSlices(here(tensor.values), tensor.indices, tensor.dense_shape)
        rest = tf.zeros_like(tensor)
        if shows_overflow:
            rest = tf.where(tf.math.is_finite(tensor), rest, float("nan"))
        return tf.where(is_first, tensor, rest)

    sums = iter([here(tensor) for tensor in context.all_reduce("SUM", present)])
    return [None if tensor is None else next(sums) for tensor in tensors]


def _unbuilt_weights_message(optimizer: str) -> str:
    return (
        "This optimizer starts from the values of the weights, so they must exist before training. "
        f"Received: {optimizer!r}, and weights that the traced function creates. Create the model "
        "again, and call it (or each of its parts) on a batch before."
    )
