"""Replicas: the variables of each, how they communicate, and conditional updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ga_model.base import _messages
from ga_model.base._internals import (
    raw,
    scaled_for_replicas,
    strategy_of_model,
    strategy_of_optimizer,
)
from ga_model.base._internals_tf import copy_on_replica

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
_TRIED = (tf.distribute.OneDeviceStrategy, *_MIRRORED)


def check(model: Any, optimizers: Sequence[Any]) -> None:
    """Check what a model is about to be trained under.

    Raises:
        NotImplementedError: a strategy that accumulation was not tried with.
        ValueError: the model, one of its variables or an optimizer was made in another scope.
    """
    made_in, strategy = strategy_of_model(model), model.distribute_strategy
    has_none = made_in is None and not tf.distribute.has_strategy()
    if not has_none:
        check_is_tried(strategy)
    is_elsewhere = tf.distribute.has_strategy() and tf.distribute.get_strategy() is not made_in
    elsewhere = [f"the model {model.name!r}"] if is_elsewhere else []
    if isinstance(strategy, _MIRRORED) and not is_elsewhere:
        plain = [v for v in model.variables if not _is_distributed(v.value)]
        elsewhere += [f"the variable {variable.path!r}" for variable in plain]
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if strategy_of_optimizer(inner) is not strategy:
            elsewhere.append(f"the optimizer {inner.name!r}")
    if elsewhere:
        elsewhere = list(dict.fromkeys(elsewhere))  # optimizers are in several attributes
        raise ValueError(_scope_message(elsewhere, type(strategy).__name__))


def check_is_tried(strategy: tf.distribute.Strategy) -> None:
    """Raise NotImplementedError for a strategy that accumulation was not tried with."""
    if not isinstance(strategy, _TRIED):
        raise NotImplementedError(_strategy_message(type(strategy).__name__))


def check_can_search(strategy: Any) -> None:
    """Raise NotImplementedError where workers would have to agree on a size."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise NotImplementedError(_workers_size_message())


def current() -> tf.distribute.Strategy:
    """Return the strategy of the scope that the code here runs in, if it was tried."""
    strategy = tf.distribute.get_strategy()
    if tf.distribute.has_strategy():
        check_is_tried(strategy)
    return strategy


def num_replicas() -> int:
    """Return the number of replicas that the code that runs here is replicated on."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def most_on_a_replica(strategy: Any, values: Any, count: Callable[[Any], int]) -> int:
    """Return the largest `count` of what a replica of this machine has of nested values."""
    leaves = [strategy.experimental_local_results(leaf) for leaf in keras.tree.flatten(values)]
    return max((count(list(parts)) for parts in zip(*leaves)), default=0)


def is_on_replica() -> bool:
    """Return whether this is the code of a replica, as it is without a strategy."""
    return not tf.distribute.in_cross_replica_context()


def run_on_replicas(strategy: tf.distribute.Strategy, function: Callable[[], Any]) -> None:
    """Run `function` on every replica, or here, if this is a replica."""
    if tf.distribute.get_strategy() is strategy and is_on_replica():
        function()
    else:
        strategy.run(function)


def trace(model: Any, data: Any) -> list[tf.Variable]:
    """Trace the model's `train_step`, which makes all variables that it uses, without running it.

    Returns the variables.

    Args:
        model: a `keras.Model`.
        data: what a replica gets, as Keras passes it.
    """
    strategy = model.distribute_strategy

    def step(data: Any) -> Any:
        return strategy.run(model.train_step, args=(data,))

    concrete = tf.function(step, autograph=False).get_concrete_function(data)
    return list(concrete.graph.variables)


def make_variables(initial: Callable[[], Any]) -> Any:
    """Make variables, one copy per replica, outside the graph that is being traced.

    Each replica reads and writes its own copy; elsewhere it is read from the first replica and
    written to all. A variable that `tf.function` sees coming into being makes it trace a second
    time. These are made eagerly and out of its sight.

    Args:
        initial: function that returns the tensors that they begin with, in any nest.
    """

    def make(value: tf.Tensor | None) -> tf.Variable | None:
        return (
            None
            if value is None
            else tf.Variable(
                value,
                trainable=False,
                name="ga_model",  # TensorFlow tells variables that replicas share by their names
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                experimental_enable_variable_lifting=False,
            )
        )

    with tf.init_scope():
        return tf.nest.map_structure(make, initial())


def _is_distributed(variable: tf.Variable) -> bool:
    return isinstance(variable, tf.distribute.DistributedValues)


def copies(variable: tf.Variable) -> list[tf.Variable]:
    """Return the copies of a variable on this machine's replicas."""
    return list(variable.values) if _is_distributed(variable) else [variable]


def own_copy(variable: Any) -> tf.Variable:
    """Return this replica's copy of a variable, which can be written to in a branch."""
    variable = raw(variable)
    return copy_on_replica(variable) if _is_distributed(variable) else variable


def copies_of_all(variables: Iterable[Any]) -> list[tf.Variable]:
    """Return the copies of variables of Keras or TensorFlow on this machine's replicas."""
    return [copy for variable in variables for copy in copies(raw(variable))]


def mean_over_replicas(values: Any) -> Any:
    """Return the mean of the replicas' tensors, or nests of them. Every replica has to call it."""
    if num_replicas() == 1 or not tf.nest.flatten(values):
        return values
    return tf.distribute.get_replica_context().all_reduce("MEAN", values)


def sum_over_replicas(values: list[Any]) -> list[Any]:
    """Return the sums of the replicas' tensors. Every replica has to call it."""
    if num_replicas() == 1 or not values:
        return values
    return tf.distribute.get_replica_context().all_reduce("SUM", values)  # type: ignore[no-any-return]


def max_over_replicas(value: tf.Tensor) -> tf.Tensor:
    """Return the maximum of the replicas' tensors by entry. Every replica has to call it."""
    if num_replicas() == 1:
        return value
    gathered = tf.distribute.get_replica_context().all_gather(value[tf.newaxis], axis=0)
    return tf.reduce_max(gathered, axis=0)


def exactly_scaled(loss: tf.Tensor, is_sum: bool = False) -> tf.Tensor:
    """Return a loss that Keras divided by the number of replicas, divided by it exactly.

    Keras multiplies by 1 / replicas rounded to float32, also a loss in float64.

    Args:
        loss: the loss.
        is_sum: whether it should not have been divided at all.
    """
    replicas = num_replicas()
    if is_sum:
        loss = loss * replicas
    if replicas == 1:
        return loss
    with tf.init_scope():
        scale = float(scaled_for_replicas(tf.ones((), tf.float64)))
    return loss if scale * replicas == 1.0 else loss * tf.constant(1 / replicas / scale, loss.dtype)


def run_if(condition: Any, function: Callable[[], Any]) -> None:
    """Run `function` in the graph where `condition`, a bool scalar, holds. True is no branch."""
    if condition is True:
        function()
        return

    def run() -> tf.Tensor:
        function()
        return tf.constant(0)

    tf.cond(tf.convert_to_tensor(condition), run, lambda: tf.constant(0))


def _as_condition(condition: Any) -> Any:
    return condition if condition is True else tf.convert_to_tensor(condition)


def run_once_if(condition: Any, function: Callable[[], Any] | None) -> None:
    """Run `function`, if any, where `condition` holds, the same bool scalar on every replica.

    It runs in cross-replica context, where a variable's copies are written to alike.
    """
    if function is None:
        return

    def run(strategy: Any, condition: Any) -> None:
        run_if(strategy.experimental_local_results(condition)[0], function)

    if is_on_replica():
        args = (_as_condition(condition),)
        tf.distribute.get_replica_context().merge_call(run, args)
    else:
        run_if(condition, function)


def update_if(
    condition: Any,
    weight: tf.Tensor,
    update: Callable[..., Any],
    *values: Any,
    after: Callable[[], Any] = lambda: None,
) -> None:
    """Run `update`, which applies an optimizer, in the graph where `condition` holds.

    To be called on every replica.

    An optimizer synchronizes replicas, also a single one, with `merge_call`, and that is not
    allowed in a branch of the replica's own graph. So the branch stands in cross-replica context
    and calls the replicas from there (otherwise it fails, see keras#20582).

    Args:
        condition: bool scalar, the same on every replica.
        weight: float64 scalar tensor of this replica. Where the sum over replicas is zero there is
            no update. It is known only where `condition` holds: only then replicas communicate.
        update: function of `values`. It must not contain another `update_if`.
        values: nests of this replica's tensors. `update` must not take any from elsewhere, as one
            replica's function runs on all.
        after: function to run on every replica where `condition` holds, after an update or instead
            of one.
    """

    def branch(strategy: Any, condition: Any, weight: Any, *values: Any) -> None:
        def run() -> None:
            if strategy.num_replicas_in_sync > 1:
                total = strategy.reduce("SUM", weight, axis=None)
            else:
                total = weight
            run_if(tf.not_equal(total, 0.0), lambda: on_replicas(update, values))
            on_replicas(after)

        def on_replicas(function: Callable[..., Any], args: Any = ()) -> None:
            strategy.extended.call_for_each_replica(function, args=args)

        run_if(strategy.experimental_local_results(condition)[0], run)

    args = (_as_condition(condition), weight, *values)
    tf.distribute.get_replica_context().merge_call(branch, args)


def _strategy_message(name: str) -> str:
    return (
        "Accumulation supports OneDeviceStrategy, MirroredStrategy and "
        "MultiWorkerMirroredStrategy of `tf.distribute`. "
        f"Received: {name}, which is not tested. "
        "Create the model under one of those strategies or without one, "
        f"or {_messages.WITHOUT}."
    )


def _scope_message(elsewhere: list[str], name: str) -> str:
    return (
        "A model must be created, compiled and trained under the same `tf.distribute` strategy. "
        f"Received: {' and '.join(elsewhere)}, created outside the scope of {name}. "
        "Create and compile the model inside one `with strategy.scope():`, "
        "and call `fit` on it."
    )


def _workers_size_message() -> str:
    return (
        "All workers must have the same `microbatch_size`, but each would find its own. "
        'Received: microbatch_size="auto" under MultiWorkerMirroredStrategy. '
        "Set it to a number that fits on every worker."
    )
