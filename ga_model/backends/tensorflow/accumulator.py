"""The public sum of gradients on TensorFlow, for custom training loops, in and out of graphs."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ga_model.backends.tensorflow import optimizers, replicas
from ga_model.base import _numbers
from ga_model.base._internals import overwrites, raw
from ga_model.base._names import suggests_argument_names
from ga_model.base._types import Gradient, Nest, Scalar, Tensor
from ga_model.core import messages
from ga_model.core.accumulator import Accumulator, nothing
from ga_model.core.backend_types import Applied
from ga_model.core.models import is_of_keras
from ga_model.core.window import Largest, Positions, Rows, shrinkage, shrunk, with_values


class GradientAccumulator(Accumulator):
    """Sums weighted gradients over microbatches and applies their mean to an optimizer.

    For custom training loops, eagerly and in a `tf.function`. The mean of a window is
    sum(w_i * g_i) / sum(w_i). The weight of a microbatch is the divisor of its loss: the number of
    samples for a mean over samples, the number of valid tokens for a mean over tokens.

    The first `add` creates one buffer per variable that has a gradient: float32 for float16 and
    bfloat16 variables, otherwise the variable's dtype. A variable whose gradients are None is
    passed to the optimizer with None. For a variable with `overwrite_with_gradient`, such as the
    scale of a float8 layer, the largest value is used.

    The rows of `tf.IndexedSlices` are concatenated: one for each lookup of the window. Rows whose
    indices do not depend on the samples, such as those of positions, are added elementwise, because
    the full batch has each of them once. They are only detected where `add` is called in a
    `tf.function` for any number of samples, such as one with
    `input_signature=[tf.TensorSpec([None, length])]`. Elsewhere each lookup is a row.

    Under a `tf.distribute` strategy, create it in the strategy's scope and call `add` in
    `strategy.run`, with the gradients that you would pass to `optimizer.apply` there: those of a
    loss that is divided by the number of replicas, as Keras losses are. Replicas communicate only
    in `apply`, which may be called there or outside.

    Attributes:
        num_microbatches: int64 scalar variable, microbatches since the last update or reset.

    Example:

    ```python
    optimizer = keras.optimizers.Adam()
    accumulator = GradientAccumulator()

    @tf.function
    def microbatch_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        variables = model.trainable_variables
        accumulator.add(tape.gradient(loss, variables), variables, weight=tf.shape(x)[0])
        return loss

    for step, (x, y) in enumerate(dataset, start=1):
        microbatch_step(x, y)
        if step % 4 == 0:
            accumulator.apply(optimizer)
    accumulator.apply(optimizer)  # the rest of the epoch; an empty window changes nothing
    ```
    """

    _tensor_type = (tf.Tensor, tf.IndexedSlices)
    _source = "what `tape.gradient` returns"

    @suggests_argument_names
    def __init__(self) -> None:
        self._strategy = tf.distribute.get_strategy()
        if tf.distribute.has_strategy():
            replicas.check_is_tried(self._strategy)
        self.variables = []
        self._is_sum: bool | None = None
        self._sums: list[Nest] = []  # variables, nests of them, or None
        zero = tf.constant(0.0, tf.float64)
        with self._strategy.scope():
            self.num_microbatches, self._total, self._unit = _variables(
                [tf.constant(0, tf.int64), zero, zero]
            )

    def _add(
        self, gradients: list[Gradient], variables: list[keras.Variable], weight: Scalar | None
    ) -> None:
        self._check_is_on_replica()
        is_sum = weight is None
        if self._is_sum not in (None, is_sum):
            raise ValueError(messages.mixed_weights_message())
        if not self.variables:
            self._sums = list(map(_buffer, gradients, variables))
        self._is_sum, self.variables = is_sum, self.variables or variables
        pairs = zip(variables, gradients, self._sums)
        if late := [v for v, gradient, buffer in pairs if buffer is None is not gradient]:
            raise RuntimeError(messages.late_gradient_message(late))
        weight = _numbers.float64(1.0 if is_sum else weight)
        unit, counts = self._unit.read_value(), weight != 0
        later = tf.maximum(unit, abs(weight))
        relative, shrink = _numbers.divide_or_zero(weight, later), shrinkage(unit, later)
        is_first = tf.equal(self.num_microbatches, 0)
        for variable, buffer, gradient in zip(self.variables, self._sums, gradients):
            before = _read(buffer, is_first)
            if gradient is not None:
                weighted = _weighted(gradient, buffer, variable, relative)
                _assign(buffer, _plus(before, weighted, shrink, counts, is_first))
            elif buffer is not None:
                _assign(buffer, shrunk(before, shrink))
        self._total.assign(self._total * shrink + relative)
        self._unit.assign(later)
        self.num_microbatches.assign_add(1)

    def mean(self) -> list[Gradient]:
        """Return the window's gradient, in the variables' dtypes.

        One per variable: a tensor, `tf.IndexedSlices` or None, like the first that was added.

        This is sum(w_i * g_i) / sum(w_i), or sum(g_i) if the weights are None. It is not finite if
        the weights sum to zero. With several replicas, all must call this; it is the share of this
        replica, and optimizers add up the shares.

        Raises:
            ValueError: with several replicas, called outside `strategy.run`.
        """
        self._check_is_on_replica()
        return self._mean(self._shared_total())

    def _shared_total(self) -> tf.Tensor:
        """Return the total weight for this replica's sums. All replicas must call it."""
        return replicas.shared_total(self._unit.read_value(), self._total.read_value())

    def _mean(self, total_weight: tf.Tensor) -> list[Gradient]:
        divisor = tf.constant(1.0, tf.float64) if self._is_sum else total_weight
        is_empty = tf.equal(self.num_microbatches, 0)

        def mean(buffer: Nest, variable: keras.Variable) -> Gradient:
            total, dtype = _read(buffer, is_empty), tf.as_dtype(variable.dtype)
            total = with_values(total, lambda v: tf.cast(_numbers.divided(v, divisor), dtype))
            return optimizers.as_applied(total, variable)

        return list(map(mean, self._sums, self.variables))

    def _update(
        self, optimizer: keras.optimizers.Optimizer, sums: object, variables: list[keras.Variable]
    ) -> None:
        if not variables:
            if not tf.executing_eagerly():
                raise RuntimeError(_empty_apply_message())
            return

        if replicas.is_on_replica_of(self._strategy):
            self._update_on_replica(optimizer)
        else:
            self._strategy.run(self._update_on_replica, args=(optimizer,))

    def _update_on_replica(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Make the update; every replica calls it.

        An optimizer synchronizes replicas, also a single one, by `merge_call`, which a branch of a
        replica's graph cannot contain. So the branch is outside, and calls the replicas.
        """
        if not optimizer.built:
            # Retrace, as an earlier trace scales losses by a constant instead of the new variable.
            is_seen = hasattr(optimizer, "inner_optimizer")
            optimizers.build_outside(optimizer, optimizer.build, self.variables, is_seen)
        total_weight = self._shared_total()
        has_weight = tf.not_equal(replicas.largest(abs(total_weight)), 0.0)

        def update(total_weight: tf.Tensor) -> None:
            has_own = not is_of_keras(optimizer, "apply_gradients")
            applied = Applied(optimizer, tuple(self.variables), via_apply_gradients=has_own)
            optimizers.apply(applied, self._mean(total_weight))

        def branch(strategy: tf.distribute.Strategy, has_weight: Tensor, total: Tensor) -> None:
            def run() -> tf.Tensor:
                strategy.extended.call_for_each_replica(update, args=(total,))
                return tf.constant(0)

            has_weight = strategy.experimental_local_results(has_weight)[0]
            tf.cond(has_weight, run, lambda: tf.constant(0))

        tf.distribute.get_replica_context().merge_call(branch, args=(has_weight, total_weight))

    def reset(self) -> None:
        """Forget the open window. Buffers stay allocated."""
        for state in (self.num_microbatches, self._total, self._unit):
            state.assign(tf.zeros((), state.dtype))
        for buffer in self._sums:
            if type(buffer) is Rows:
                _assign(buffer, tf.nest.map_structure(lambda v: tf.zeros_like(v[:0]), buffer))

    def _check_is_on_replica(self) -> None:
        if not replicas.is_on_replica_of(self._strategy):
            raise ValueError(_scope_message())

    def _tensor(self, gradient: Any, variable: keras.Variable) -> Gradient:
        if isinstance(gradient, tf.IndexedSlices):
            values, rows = gradient.values, gradient.values.shape[1:]
            shape = [variable.shape[0], *rows] if rows.is_fully_defined() else list(variable.shape)
            return tf.IndexedSlices(values, gradient.indices, tf.constant(shape, tf.int64))
        gradient = super()._tensor(gradient, variable)
        if gradient is None or gradient.shape.is_fully_defined():
            return gradient
        return tf.ensure_shape(gradient, variable.shape)

    def _number(self, weight: Any) -> Scalar:
        weight = raw(weight)
        if not isinstance(weight, (tf.Tensor, tf.Variable)):
            return super()._number(weight)
        weight = tf.convert_to_tensor(weight)
        is_number = weight.dtype.is_floating or weight.dtype.is_integer or weight.dtype.is_bool
        if weight.shape.rank or not is_number:
            raise ValueError(messages.weight_message(weight))
        return tf.stop_gradient(tf.cast(weight, tf.float64))


def _variables(values: Nest) -> Nest:
    """Create variables, one for each replica, outside of the present graph.

    `tf.function` traces again if it notices a new variable.
    """

    def create(value: tf.Tensor) -> tf.Variable:
        has_rows = value.shape.rank and value.shape[0] == 0
        return tf.Variable(
            value,
            trainable=False,
            shape=tf.TensorShape([None, *value.shape[1:]]) if has_rows else None,
            name="ga_model",  # TensorFlow matches the variables of replicas by name
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            experimental_enable_variable_lifting=False,
        )

    with tf.init_scope():
        return tf.nest.map_structure(create, values)


def _buffer(gradient: Gradient, variable: keras.Variable) -> Nest:
    """Create the variables that hold the sum of a variable's gradients; None without a gradient."""
    if gradient is None:
        return None
    dtype = tf.as_dtype(_numbers.sum_dtype(variable.dtype))
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    number = gradient.indices.shape[0] if is_sparse and _is_by_position(gradient) else 0
    with tf.init_scope():
        if overwrites(variable):
            return _variables(Largest(tf.fill(variable.shape, dtype.min)))
        if not is_sparse:
            return _variables(nothing(variable.shape, dtype))
        rows = nothing([number, *variable.shape[1:]], dtype)
        kind = Positions if number else Rows
        return _variables(kind(rows, tf.zeros([number], gradient.indices.dtype), ()))


def _is_by_position(gradient: tf.IndexedSlices) -> bool:
    """Return whether a sparse gradient has the same number of rows for any number of samples."""
    if tf.executing_eagerly() or not gradient.indices.shape[0]:
        return False
    inputs = getattr(tf.compat.v1.get_default_graph(), "inputs", ())
    return any(t.shape.rank and t.shape[0] is None for t in inputs)


def _read(buffer: Nest, is_first: tf.Tensor) -> Gradient:
    """Return the sum of the open window. If it is empty, buffers still hold the last sum."""
    if buffer is None:
        return None
    total = tf.nest.map_structure(lambda variable: variable.read_value(), buffer)
    if type(total) is Rows:
        return total
    if isinstance(total, Largest):
        return Largest(tf.where(is_first, total.values.dtype.min, total.values))
    return with_values(total, lambda v: tf.where(is_first, nothing((), v.dtype), v))


def _assign(buffer: Nest, value: Nest) -> None:
    tf.nest.map_structure(lambda variable, new: variable.assign(new), buffer, value)


def _weighted(
    gradient: tf.Tensor | tf.IndexedSlices,
    buffer: Nest,
    variable: keras.Variable,
    relative: tf.Tensor,
) -> Gradient:
    """Return a gradient times its weight, in the dtype and form of the sum."""
    dtype = _numbers.sum_dtype(variable.dtype)
    relative = tf.cast(relative, dtype)
    if not isinstance(buffer, Rows):
        gradient = tf.cast(tf.convert_to_tensor(gradient), dtype)
        return Largest(gradient) if isinstance(buffer, Largest) else gradient * relative
    if not isinstance(gradient, tf.IndexedSlices):
        ids = tf.range(tf.shape(gradient)[0], dtype=buffer.indices.dtype)
        gradient = tf.IndexedSlices(gradient, ids)
    values = tf.reshape(tf.cast(gradient.values, dtype), [-1, *variable.shape[1:]])
    ids = tf.cast(tf.reshape(gradient.indices, [-1]), buffer.indices.dtype)
    return type(buffer)(values * relative, ids, ())


def _plus(
    total: Gradient, new: Gradient, shrink: tf.Tensor, counts: tf.Tensor, is_first: tf.Tensor
) -> Gradient:
    """Add a microbatch's weighted gradient to a sum if it counts; otherwise it may be NaN."""
    if isinstance(total, Largest):
        return total.plus(new, shrink, counts)
    if isinstance(total, Positions):
        is_same = tf.reduce_all(tf.equal(total.indices, new.indices))
        tf.debugging.Assert(tf.logical_or(is_first, is_same), [_moved_message()])
        return new._replace(values=_numbers.added(total.values, new.values, shrink, counts))
    if not isinstance(total, Rows):
        return _numbers.added(total, new, shrink, counts)
    number = tf.where(counts, tf.shape(new.indices)[0], 0)
    values = tf.concat([shrunk(total.values, shrink), new.values[:number]], 0)
    return Rows(values, tf.concat([total.indices, new.indices[:number]], 0), ())


def _moved_message() -> str:
    return (
        "As many rows of a table as `add` was traced for must be the same ones in all microbatches "
        "of a window. Received: other indices than in the microbatch before. Call `add` outside of "
        "`tf.function`, where each lookup counts by itself."
    )


def _empty_apply_message() -> str:
    return (
        "`GradientAccumulator.apply()` must know its variables when a `tf.function` traces it. "
        "Received: a call that was traced before any gradient was added. "
        "Call `add()` once before `apply()` is traced, or put both into the same `tf.function`."
    )


def _scope_message() -> str:
    return (
        "A `GradientAccumulator` must be used under the `tf.distribute` strategy it was created "
        "in. Received: a call from elsewhere. Create it inside `with strategy.scope():`, like the "
        "model and the optimizer, and call it in the function that `strategy.run` runs."
    )
