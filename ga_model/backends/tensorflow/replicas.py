"""Replicas of `tf.distribute`: run functions on each, and exchange sums at an update.

Functions of the core run on every replica. The data of one replica is a nest of tensors. That of
all replicas of this process is the same nest, with `OnReplicas` instead of tensors. With u_r the
unit in which replica r counts its weights, and U the largest of them, the mean of all replicas is

    sum_r(sum_i(w_ri / u_r * g_ri) / t_r),   t_r = s * U / u_r * sum_r(u_r / U * sum_i(w_ri / u_r))

where s is Keras's factor for the loss of a replica: one over their number. So replicas exchange
these numbers first, and gradients only in the optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ga_model.base import _numbers
from ga_model.base._internals import (
    metrics_exchange,
    raw,
    scale_for_replicas,
    strategy_of_model,
    strategy_of_optimizer,
)
from ga_model.base._types import Nest, Scalar, Tensor
from ga_model.core.batch import Batch, samples_between
from ga_model.core.messages import WITHOUT
from ga_model.core.models import optimizers_in
from ga_model.core.noise import Squares
from ga_model.core.statistics import Moments
from ga_model.core.window import Amount, Sums

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
_TRIED = (tf.distribute.OneDeviceStrategy, *_MIRRORED)
_ADDED = ("num_counted", "num_skipped", "num_news", "has_zero_division", "is_uneven")  # of `Sums`


class OnReplicas:
    """A leaf of a nest: its value on each replica of this process."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self.values = tuple(values)

    def __int__(self) -> int:
        return max(map(int, self.values))


class Replicas:
    """The replicas of a strategy; `number` counts those of all processes."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        self.number = int(strategy.num_replicas_in_sync)
        self._devices = strategy.extended.worker_devices
        self._num_here = len(self._devices)
        self._places = self._distributed(range(self._num_here))

    def is_inside(self) -> bool:
        """Return whether this code runs on a replica."""
        return is_on_replica_of(self.strategy)

    def per_replica(self, nest: Nest) -> list[Nest]:
        """Return a nest as each replica of this process has it."""

        def of_replica(place: int, leaf: Any) -> Any:
            if isinstance(leaf, OnReplicas):
                return leaf.values[place]
            if isinstance(leaf, tf.distribute.DistributedValues):
                return self.strategy.experimental_local_results(leaf)[place]
            return leaf

        every = (functools.partial(of_replica, place) for place in range(self._num_here))
        return [tf.nest.map_structure(of_one, nest) for of_one in every]

    def together(self, nests: Sequence[Nest]) -> Nest:
        """Join the nests of the replicas into one: the inverse of `per_replica`."""

        def join(*leaves: Tensor | None) -> OnReplicas | None:
            return None if leaves[0] is None else OnReplicas(leaves)

        return tf.nest.map_structure(join, *nests)

    def run(
        self, function: Callable[..., Nest], arguments: Sequence[tuple[Nest, ...]]
    ) -> list[Nest]:
        """Run a function on every replica, each with its own tuple of arguments."""
        found: list[Nest] = [None] * self._num_here

        def run(place: int) -> None:
            found[place] = function(*arguments[place])

        self.strategy.run(run, args=(self._places,))
        return found

    def once(self, function: Callable[[], None]) -> None:
        """Run a function once for all replicas, each of which calls this."""
        if self.is_inside():
            tf.distribute.get_replica_context().merge_call(lambda _: function())
        else:
            function()

    def on_devices(self, function: Callable[[Nest], Nest], each: Sequence[Nest]) -> Nest:
        """Apply a function to the nest of each replica, on its device, and join the results."""
        found = []
        for device, nest in zip(self._devices, each):
            with tf.device(device):
                found.append(function(nest))
        return self.together(found)

    def samples_of(self, data: Nest, of_all: bool) -> Nest:
        """Return samples of a batch; with `of_all`, the same in all processes."""
        each = self.per_replica(data)
        if of_all and self.number > self._num_here:
            return tf.nest.map_structure(self._gathered, *each)
        return max(each, key=lambda part: Batch(part, None).rows)

    def _gathered(self, *leaves: Tensor) -> Tensor:
        if leaves[0] is None or not len(leaves[0].shape):
            return leaves[0]
        return self.strategy.gather(self._distributed(map(tf.convert_to_tensor, leaves)), axis=0)

    def mean(self, nest: Nest) -> Nest:
        """Return a nest of the means over all replicas."""

        def mean(*leaves: Tensor) -> Tensor:
            if leaves[0] is None or self.number == 1:
                return leaves[0]
            if self.number == self._num_here:
                return tf.reduce_mean(tf.stack(leaves), 0)
            return self.strategy.reduce("MEAN", self._distributed(leaves), axis=None)

        return tf.nest.map_structure(mean, *self.per_replica(nest))

    def _distributed(self, values: Iterable[Scalar]) -> tf.distribute.DistributedValues:
        """Return a `tf.distribute` value from one value for each replica of this process."""
        left = iter(values)
        distribute = self.strategy.experimental_distribute_values_from_function
        return distribute(lambda context: next(left))

    # In functions that every replica runs.

    def exchange_sums(self, sums: Sums) -> Sums:
        """Return the sums of this replica, without gradients and amounts, summed over replicas."""
        is_sum = sums.total is None
        numbers = {name: getattr(sums, name) for name in _ADDED}
        weights = sums.unit, 0.0 if is_sum else sums.total
        unit, total, *others = _vectors([*weights, *numbers.values()])
        added = {
            name: tf.cast(tf.reduce_sum(vector), number.dtype)  # True if any flag is
            for (name, number), vector in zip(numbers.items(), others)
        }
        shares = tf.math.divide_no_nan(unit, tf.reduce_max(unit))
        squares = sums.squares
        if squares:
            of_all = _vectors([number for pair in squares for number in pair])
            # In this replica's unit, for a loss that is not divided by the number of replicas.
            in_own = tf.math.divide_no_nan(tf.reduce_max(unit), sums.unit) * self.number**2
            totals = [tf.reduce_sum(v * shares) * in_own for v in of_all[::2]]
            squares = tuple(map(Squares, totals, map(tf.reduce_sum, of_all[1::2])))
        return sums._replace(
            total=None if is_sum else _total_of(sums.unit, unit, total),
            **added,
            moments=[Moments.of_stacked(Moments._make(map(_stacked, m))) for m in sums.moments],
            squares=squares,
        )

    def amounts(self, amounts: Sequence[Amount]) -> list[Amount]:
        """Return the sums of logged numbers over all replicas."""
        if not amounts:
            return []
        found = [tf.reduce_sum(v) for v in _vectors([n for a in amounts for n in a])]
        return [Amount._make(found[place : place + 4]) for place in range(0, len(found), 4)]


class SharedBatch(Batch):
    """A batch whose samples are shared by replicas, perhaps unevenly; `size` is for one replica."""

    def __init__(self, replicas: Replicas, data: Nest, size: int | None) -> None:
        self._replicas, self._each, self._size = replicas, replicas.per_replica(data), size
        parts = [Batch(part, size) for part in self._each]
        self.rows = max(part.rows for part in parts)
        self.num_microbatches = max(part.num_microbatches for part in parts)

    def microbatch(self, index: int) -> Nest:
        if not self.is_split:
            return self._replicas.together(self._each)
        size = self._size or self.rows
        start, stop = index * size, (index + 1) * size
        return self._replicas.on_devices(
            lambda part: samples_between(part, start, stop), self._each
        )


def shared_total(unit: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Return the divisor t_r of this replica's sums from its unit and total, float64 scalars."""
    return _total_of(unit, *_vectors([unit, total]))


def _total_of(own: tf.Tensor, unit: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    largest = tf.reduce_max(unit)
    of_window = tf.reduce_sum(total * tf.math.divide_no_nan(unit, largest))
    factor = tf.where(own == 0, tf.ones_like(own), tf.math.divide_no_nan(largest, own))
    return of_window * factor * scale_for_replicas(tf.ones((), tf.float64))


def largest(tensor: tf.Tensor) -> tf.Tensor:
    """Return the elementwise maximum over the replicas' tensors."""
    return tf.reduce_max(_stacked(tensor), axis=0)


def _vectors(numbers: Sequence[Scalar]) -> list[tf.Tensor]:
    """Return for each scalar a float64 vector of its values on all replicas."""
    row = tf.stack([_numbers.float64(number) for number in numbers])
    return list(tf.unstack(_stacked(row), axis=1))


def _stacked(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensors of all replicas, stacked on a new first axis."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return tensor[tf.newaxis]
    stacked = context.all_gather(tensor[tf.newaxis], axis=0)
    return tf.ensure_shape(stacked, [context.num_replicas_in_sync, *tensor.shape])


def is_on_replica_of(strategy: tf.distribute.Strategy) -> bool:
    """Return whether this code runs on a replica of a strategy."""
    is_here = tf.distribute.get_strategy() is strategy
    return is_here and not tf.distribute.in_cross_replica_context()


def check(model: keras.Model, microbatch_size: int | str | None) -> None:
    """Raise an error if a model cannot be accumulated under its strategy.

    Raises:
        NotImplementedError: the strategy is not tested; or workers would have to agree on a size.
        ValueError: the model, one of its variables or an optimizer was created in another scope; or
            a layer or metric would exchange values of single microbatches.
    """
    made_in, strategy = strategy_of_model(model), model.distribute_strategy
    has_none = made_in is None and not tf.distribute.has_strategy()
    if not has_none:
        check_is_tried(strategy)
    is_elsewhere = tf.distribute.has_strategy() and tf.distribute.get_strategy() is not made_in
    elsewhere = [f"the model {model.name!r}"] if is_elsewhere else []
    if isinstance(strategy, _MIRRORED) and not is_elsewhere:
        plain = [v for v in model.variables if not _is_distributed(raw(v))]
        elsewhere += [f"the variable {variable.path!r}" for variable in plain]
    for optimizer in optimizers_in(vars(model)):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if strategy_of_optimizer(inner) is not strategy:
            elsewhere.append(f"the optimizer {inner.name!r}")
    if elsewhere:
        elsewhere = list(dict.fromkeys(elsewhere))  # optimizers are in several attributes
        raise ValueError(_scope_message(elsewhere, type(strategy).__name__))
    workers = tf.distribute.MultiWorkerMirroredStrategy
    if microbatch_size == "auto" and isinstance(strategy, workers):
        raise NotImplementedError(_workers_size_message())
    if strategy.num_replicas_in_sync > 1:
        layers = [] if microbatch_size is None else model._batch_normalization_layers()
        if names := [layer.name for layer in layers if getattr(layer, "synchronized", False)]:
            raise ValueError(_synchronized_message(names))
        if model.skip_nonfinite and metrics_exchange():
            raise ValueError(_metrics_message())


def check_is_tried(strategy: tf.distribute.Strategy) -> None:
    """Raise NotImplementedError for a strategy that is not tested."""
    if not isinstance(strategy, _TRIED):
        raise NotImplementedError(_strategy_message(type(strategy).__name__))


def _is_distributed(variable: tf.Variable) -> bool:
    return isinstance(variable, tf.distribute.DistributedValues)


def copies(variable: keras.Variable | tf.Variable) -> list[tf.Variable]:
    """Return the copies of a variable of Keras or TensorFlow on this machine's replicas."""
    variable = raw(variable)
    return list(variable.values) if _is_distributed(variable) else [variable]


def _strategy_message(name: str) -> str:
    return (
        "Accumulation supports OneDeviceStrategy, MirroredStrategy and "
        "MultiWorkerMirroredStrategy of `tf.distribute`. "
        f"Received: {name}, which is not tested. "
        "Create the model under one of those strategies or without one, "
        f"or {WITHOUT}."
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


def _synchronized_message(layers: list[str]) -> str:
    return (
        "Synchronized BatchNormalization cannot exchange the statistics of microbatches. "
        f"Received: BatchNormalization layers with `synchronized=True`: {layers}. Set "
        "`synchronized=False`, or `microbatch_size=None`, and call `compile()` again."
    )


def _metrics_message() -> str:
    return (
        "With several replicas, Keras before 3.10 cannot take back the numbers of metrics of a "
        f"microbatch that is skipped. Received: skip_nonfinite=True, with Keras "
        f"{keras.__version__}. Install keras>=3.10, or set `skip_nonfinite=False`."
    )
