"""Optimizers: build their variables ahead of a branch, and apply them to sums over replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ga_model.replicas import _strategy


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create the optimizer's variables, as its first `apply` would.

    Done ahead of `_strategy.update_if`, because variables made inside a branch belong to that
    branch, and out of sight of `tf.function`, as in `_strategy.make_variables`. A
    LossScaleOptimizer has to be seen: this trace has its initial scale in it, and only the second
    one its variable.

    Raises:
        ValueError: it begins with the values of the variables, and they have none yet: a step that
            is traced for the first time is making them.
    """
    is_seen = hasattr(optimizer, "inner_optimizer")

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if not is_seen:
            kwargs["experimental_enable_variable_lifting"] = False
        return next_creator(**kwargs)

    if not optimizer.built:
        if not _have_values(variables) and begins_with_values(optimizer):
            raise ValueError(_unbuilt_weights_message(optimizer.name))
        with (
            tf.init_scope(),
            tf.variable_creator_scope(create),
            keras.name_scope(optimizer.name, caller=optimizer),
        ):
            optimizer.build(list(variables))


def _have_values(variables: Sequence[Any]) -> bool:
    """Return whether variables have their first values."""
    with tf.init_scope():
        handles = [copy.handle for copy in _strategy.copies_of_all(variables)]
        return all(bool(tf.raw_ops.VarIsInitializedOp(resource=handle)) for handle in handles)


def begins_with_values(optimizer: Any) -> bool:
    """Return whether a variable of the optimizer begins with what a variable of the model has.

    That of ScheduleFreeAdamW does. One that is built, or that cannot be copied, does not.
    """
    if optimizer.built:
        return False
    value = 0.7182818
    with tf.init_scope():
        try:
            copy = type(optimizer).from_config(optimizer.get_config())
            copy.build([keras.Variable([value])])
        except Exception:  # of a class of the user's
            return False
        return any(v.shape == (1,) and abs(float(v[0]) - value) < 1e-3 for v in copy.variables)


def can_compile() -> bool:
    """Return whether `compiled` compiles here."""
    return not (tf.distribute.has_strategy() or tf.executing_eagerly())


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that may apply an optimizer so that XLA compiles it, where it can.

    Not under a strategy: replicas cannot communicate from inside another `tf.function`.
    """
    if not can_compile():
        return function
    return tf.function(function, autograph=False, jit_compile=True)  # type: ignore[no-any-return]


def overrides_pairs(optimizer: Any) -> bool:
    """Return whether an optimizer has an `apply_gradients` of the user's own."""
    method = getattr(optimizer, "apply_gradients", None)
    base = keras.optimizers.Optimizer.apply_gradients
    return method is not None and getattr(method, "__func__", None) is not base


def apply(
    optimizer: Any, gradients: list[Any], variables: list[Any], in_pairs: bool = False
) -> None:
    """Apply an optimizer on every replica to the sum over replicas of their gradients.

    An optimizer makes that sum itself, after it has clipped each replica's gradients, and a
    LossScaleOptimizer has looked for overflows in those of each machine's first replica. What they
    have to see is the sum. So for them it is made here. The first replica passes it on, the others
    zeros; with loss scaling NaN where it is not finite, or machines would decide differently, and
    wait for one another for ever.

    Args:
        optimizer: the optimizer.
        gradients: tensors, `tf.IndexedSlices` and None.
        variables: the variables.
        in_pairs: whether its `apply_gradients` does it, and not its `apply`.
    """
    is_scaled = hasattr(optimizer, "inner_optimizer")
    if _strategy.num_replicas() > 1 and (is_scaled or clips(optimizer)):
        gradients = _sum_on_first_replica(gradients, shows_overflow=is_scaled)
    if in_pairs:
        optimizer.apply_gradients(zip(gradients, variables))
    else:
        optimizer.apply(gradients, variables)


def adds_up_rows(optimizer: Any) -> bool:
    """Return whether equal rows of a sparse gradient may be summed before an update."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    linear = (keras.optimizers.SGD.update_step, keras.optimizers.Lion.update_step)
    is_linear = getattr(type(inner), "update_step", None) in linear
    return is_linear and not (clips(inner) or overrides_pairs(inner))


def is_of_keras(optimizer: Any) -> bool:
    """Return whether the updates of an optimizer are computed by Keras alone."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    parts = getattr(inner, "optimizers", None) or [inner]  # of a MultiOptimizer
    methods = [getattr(type(part), name) for part in parts for name in ("apply", "update_step")]
    modules = [str(getattr(method, "__module__", "")) for method in methods]
    return all(name.startswith("keras.") for name in modules) and not overrides_pairs(inner)


def clips(optimizer: Any) -> bool:
    """Return whether an optimizer clips gradients."""
    clipping = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    parts = getattr(optimizer, "optimizers", ())  # of a MultiOptimizer
    return any(c is not None for c in clipping) or any(map(clips, parts))


def _sum_on_first_replica(tensors: list[Any], shows_overflow: bool) -> list[Any]:
    """Return the sums over replicas on the first replica, and zeros on the others.

    Args:
        tensors: tensors, `tf.IndexedSlices` and None.
        shows_overflow: whether the others get NaN where a sum is not finite.
    """
    context = tf.distribute.get_replica_context()
    present = [tensor for tensor in tensors if tensor is not None]
    is_first = tf.equal(context.replica_id_in_sync_group, 0)

    def here(tensor: Any) -> Any:
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
        f"Received: {optimizer!r}, and weights that the first `train_step` creates. Create the "
        "model again, and call it (or each of its parts) on a batch before `fit`."
    )
