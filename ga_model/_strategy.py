"""Everything that depends on `tf.distribute`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ga_model import _messages
from ga_model._internals import (
    logs_over_replicas,
    raw,
    scaled_for_replicas,
    strategy_of_model,
    strategy_of_optimizer,
)

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
        raise ValueError(_messages.scope_message(elsewhere, type(strategy).__name__))


def check_is_tried(strategy: tf.distribute.Strategy) -> None:
    """Raise NotImplementedError for a strategy that accumulation was not tried with."""
    if not isinstance(strategy, _TRIED):
        raise NotImplementedError(_messages.strategy_message(type(strategy).__name__))


def check_can_search(strategy: Any) -> None:
    """Raise NotImplementedError where workers would have to agree on a size."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise NotImplementedError(_messages.workers_size_message())


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


def make_variables(initial: Callable[[], Any]) -> Any:
    """Make variables, one copy per replica, outside of the graph that is being traced.

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


def copies_of_all(variables: Iterable[Any]) -> list[tf.Variable]:
    """Return the copies of variables of Keras or TensorFlow on this machine's replicas."""
    return [copy for variable in variables for copy in copies(raw(variable))]


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create the optimizer's variables, as its first `apply` would.

    Done ahead of `update_if`, because variables made inside of a branch belong to that branch, and
    out of sight of `tf.function`, as in `make_variables`. A LossScaleOptimizer has to be seen: this
    trace has its initial scale in it, and only the second one its variable.

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
            raise ValueError(_messages.unbuilt_weights_message(optimizer.name))
        with (
            tf.init_scope(),
            tf.variable_creator_scope(create),
            keras.name_scope(optimizer.name, caller=optimizer),
        ):
            optimizer.build(list(variables))


def _have_values(variables: Sequence[Any]) -> bool:
    """Return whether variables have their first values."""
    with tf.init_scope():
        handles = [copy.handle for copy in copies_of_all(variables)]
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


def max_over_replicas(value: tf.Tensor) -> tf.Tensor:
    """Return the maximum of the replicas' tensors by entry. Every replica has to call it."""
    if num_replicas() == 1:
        return value
    gathered = tf.distribute.get_replica_context().all_gather(value[tf.newaxis], axis=0)
    return tf.reduce_max(gathered, axis=0)


def apply(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Apply an optimizer on every replica to the sum over replicas of their gradients.

    An optimizer makes that sum itself, after it has clipped each replica's gradients, and a
    LossScaleOptimizer has looked for overflows in those of each machine's first replica. What they
    have to see is the sum. So for them it is made here. The first replica passes it on, the others
    zeros; with loss scaling NaN where it is not finite, or machines would decide differently, and
    wait for one another for ever.
    """
    is_scaled = hasattr(optimizer, "inner_optimizer")
    if num_replicas() > 1 and (is_scaled or clips(optimizer)):
        gradients = _sum_on_first_replica(gradients, shows_overflow=is_scaled)
    optimizer.apply(gradients, variables)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that applies an optimizer so that XLA compiles it, where it can.

    Not under a strategy: replicas can not communicate from inside of another `tf.function`.
    """
    if tf.distribute.has_strategy() or tf.executing_eagerly():
        return function
    return tf.function(function, autograph=False, jit_compile=True)  # type: ignore[no-any-return]


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


def is_on_replica() -> bool:
    """Return whether this is the code of a replica, as it is without a strategy."""
    return not tf.distribute.in_cross_replica_context()


def run_on_replicas(strategy: tf.distribute.Strategy, function: Callable[[], Any]) -> None:
    """Run `function` on every replica, or here, if this is a replica."""
    if tf.distribute.get_strategy() is strategy and is_on_replica():
        function()
    else:
        strategy.run(function)


def build(keras_builds: Callable[..., None], strategy: Any, iterator: Any, batch: Any) -> None:
    """Build a model under a strategy from its first batch.

    Keras takes the mean of the replicas' parts of the batch, of which it needs no more than the
    shape. That fails with several workers, and where the parts have different numbers of rows
    (keras#20585, seen in 3.14.0 to 3.15.1). So with several replicas it is given one part, which
    will do as well in a Keras that is mended.

    Args:
        keras_builds: the model's own `_maybe_symbolic_build`.
        strategy: the model's strategy.
        iterator, batch: what it takes, one of them None.
    """
    if iterator is None or strategy.num_replicas_in_sync == 1:
        keras_builds(iterator, batch)
        return
    for _, _, batches in iterator:
        part = tf.nest.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], next(batches)
        )
        keras_builds(data_batch=part)
        break


def with_logs_that_reduce(step: Callable[[Any], Any], strategy: Any) -> Callable[[Any], Any]:
    """Return a `train_step` or `test_step` whose logs Keras can average over several workers.

    It averages over axis 0, which scalars do not have (keras#20585, seen in 3.14.0 to 3.15.1).
    Where Keras can not reduce a scalar, the step's logs get that axis.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return step

    def reduce() -> Any:
        logs = strategy.run(lambda: tf.zeros(()))
        return logs_over_replicas(logs, strategy)

    try:
        tf.function(reduce, autograph=False).get_concrete_function()
        return step
    except ValueError:

        @functools.wraps(step)
        def with_axis(data: Any) -> Any:
            return tf.nest.map_structure(_with_axis, step(data))

        return with_axis


def _with_axis(log: Any) -> Any:
    if log is None or len(getattr(log, "shape", ())) > 0:
        return log
    return tf.convert_to_tensor(log)[tf.newaxis]


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


def check_same_epoch(strategy: Any, epoch: int) -> None:
    """Raise RuntimeError on every worker if they are not about to train the same epoch."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    here = tf.constant([epoch, epoch**2], tf.int64)
    total, total_of_squares = strategy.reduce("SUM", here, axis=None).numpy()
    if total**2 != total_of_squares * strategy.num_replicas_in_sync:
        raise RuntimeError(_messages.epochs_message(epoch))


def explain(error: BaseException, strategy: Any) -> None:
    """Add a note to an error that means that another worker is gone."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and (
        isinstance(error, tf.errors.UnavailableError) or "ollective ops is aborted" in str(error)
    ):
        error.add_note(_messages.worker_message())


def run_if(condition: Any, function: Callable[[], Any]) -> None:
    """Run `function` in the graph where `condition`, a bool scalar, holds."""

    def run() -> tf.Tensor:
        function()
        return tf.constant(0)

    tf.cond(tf.convert_to_tensor(condition), run, lambda: tf.constant(0))


def run_once_if(condition: Any, function: Callable[[], Any] | None) -> None:
    """Run `function`, if any, where `condition` holds, the same bool scalar on every replica.

    It runs in cross-replica context, where a variable's copies are written to alike.
    """
    if function is None:
        return

    def run(strategy: Any, condition: Any) -> None:
        run_if(strategy.experimental_local_results(condition)[0], function)

    if is_on_replica():
        args = (tf.convert_to_tensor(condition),)
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
    and calls the replicas from there (keras#20582 tells of the failure otherwise).

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

    args = (tf.convert_to_tensor(condition), weight, *values)
    tf.distribute.get_replica_context().merge_call(branch, args)
