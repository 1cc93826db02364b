"""The sum of a window's weighted gradients, and their mean.

For microbatches i of one window with gradients g_i and weights w_i the update uses

    g = sum_i(w_i * g_i) / sum_i(w_i)

Both sums are stored and the division is made once, when the mean is read. Weights are stored in a
unit u of the window's own: the buffers hold sum_i((w_i / u) * g_i) and the total holds
sum_i(w_i / u). The unit cancels in the mean. It is the first weight that is not zero, so a window
of equal weights adds its gradients as they are, and a window of one microbatch gives back its
gradient bit for bit. Where a heavier microbatch comes, the unit grows by a power of two, and the
sums so far shrink by it, which is exact: no gradient is scaled up, out of the range of float16.

Why the buffers are not zeroed after an update: the first microbatch of a window is assigned where
the others are added, which saves one pass over the memory of all trainable variables per window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ga_model import _strategy, _validate


class GradientAccumulator:
    """Sums weighted gradients over microbatches and applies their mean to an optimizer.

    Use it in a training loop of your own; `AccumulatingModel` uses it too. Everything works inside
    and outside of `tf.function`. The update equals that of the optimizer on the whole window when
    each weight says how much its microbatch counts in the loss's mean: the number of rows for a
    mean over rows, the number of valid tokens for a mean over tokens.

    There is one buffer per variable that has a gradient, made by the first `add`: float32 for
    float16 and bfloat16 variables, else the variable's own dtype. `tf.IndexedSlices` are scattered
    into the buffer. A variable whose gradients are None is handed to the optimizer with None.

    Attributes:
        num_microbatches: int64 scalar variable, microbatches added since the last reset.

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
    accumulator.apply(optimizer)  # what is left; nothing happens if nothing is
    ```
    """

    def __init__(self) -> None:
        self.num_microbatches = _strategy.make_variable((), tf.int64)
        self._total = _strategy.make_variable((), tf.float64)
        self._unit = _strategy.make_variable((), tf.float64)
        self._variables: list[Any] = []
        self._buffers: list[tf.Variable | None] = []
        self._is_sum: bool | None = None

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        *,
        weight: Any | None = 1.0,
        _relative_weight: Any | None = None,
    ) -> None:
        """Add the gradients of one microbatch to the window.

        Args:
            gradients: one per variable: a tensor of its shape, `tf.IndexedSlices` or None.
            variables: the variables, the same ones in the same order in every call.
            weight: scalar number or tensor, what the microbatch counts in the window's mean (rows,
                or tokens, of a loss that is their mean). Zero changes nothing. None in every call
                for a loss that is a sum: the gradients are then summed and not divided.
            _relative_weight: for the package's own use: `relative_weight(weight)`, times a factor
                that all microbatches of the window share, where the gradients carry it already
                because it was folded into the loss. That saves a pass over them.

        Raises:
            ValueError: the lengths differ, the variables are not those of the first call, or
                `weight` is None in one call and a number in another.
            RuntimeError: a variable whose gradient was None at first has one now.
        """
        self._check(gradients, variables, is_sum=weight is None)
        if weight is None:
            self._store(gradients, tf.equal(self.num_microbatches, 0), tf.ones((), tf.float64))
        else:
            relative_weight = _relative_weight
            if relative_weight is None:
                relative_weight = self.relative_weight(weight)
                gradients = [_scale(gradient, relative_weight) for gradient in gradients]
            unit = self._unit_with(weight)
            shrink = tf.math.divide_no_nan(self._unit, unit)  # a power of two, mostly 1
            # A microbatch without weight is left out, not multiplied: its loss may be 0 / 0.
            _strategy.run_if(
                tf.not_equal(relative_weight, 0.0),
                lambda: self._store(gradients, tf.equal(self._unit, 0.0), shrink),
            )
            self._total.assign(self._total * shrink + relative_weight)
            self._unit.assign(unit)
        self.num_microbatches.assign_add(1)

    def relative_weight(self, weight: Any) -> tf.Tensor:
        """Return `weight` in the unit that the window has with it: float64 scalar, at most 1."""
        return tf.math.divide_no_nan(_constant(weight), self._unit_with(weight))

    def _unit_with(self, weight: Any) -> tf.Tensor:
        weight = _constant(weight)
        ratio = tf.abs(tf.math.divide_no_nan(weight, self._unit))
        grown = self._unit * 2.0 ** tf.math.ceil(tf.math.log(tf.maximum(ratio, 1.0)) / math.log(2))
        return tf.where(tf.equal(self._unit, 0.0), weight, grown)

    def _store(self, gradients: Sequence[Any], is_first: tf.Tensor, shrink: tf.Tensor) -> None:
        """Assign the gradients to the buffers, or add them to `shrink` times what is there."""
        pairs = [(b, g) for b, g in zip(self._buffers, gradients) if b is not None]

        def assign() -> tf.Tensor:
            for buffer, gradient in pairs:
                _assign(buffer, gradient)
            return tf.constant(0)

        def add() -> tf.Tensor:
            for buffer, gradient in pairs:
                _assign_add(buffer, gradient)
            return tf.constant(0)

        def shrink_and_add() -> tf.Tensor:
            for buffer, _ in pairs:
                buffer.assign(buffer * tf.cast(shrink, buffer.dtype))
            return add()

        is_same_unit = tf.equal(shrink, 1.0)
        tf.cond(is_first, assign, lambda: tf.cond(is_same_unit, add, shrink_and_add))

    @property
    def variables(self) -> list[Any]:
        """The variables whose gradients are summed; none before the first `add`."""
        return list(self._variables)

    def mean(self) -> list[Any]:
        """Return the window's gradient, one tensor in the variable's dtype or None per variable.

        That is sum(w_i * g_i) / sum(w_i), or sum(g_i) where the weights are None. Not finite where
        the weights sum to zero.
        """
        return [
            None if buffer is None else self._divide(buffer, variable)
            for buffer, variable in zip(self._buffers, self._variables)
        ]

    def _divide(self, buffer: tf.Variable, variable: Any) -> tf.Tensor:
        value = buffer.read_value()
        if not self._is_sum:
            value = value / tf.cast(self._total, value.dtype)
        return tf.cast(value, variable.dtype)

    def apply(self, optimizer: Any, *, _condition: Any = True) -> None:
        """Update the variables with the window's gradient, and start the next window.

        One call is one `optimizer.apply`, so iterations, schedules, weight decay, clipping,
        constraints and moving averages advance once. An empty window, and one whose weights sum to
        zero, changes nothing.

        Args:
            optimizer: a `keras.optimizers.Optimizer`.
            _condition: for the package's own use: bool scalar tensor, where False does nothing.

        Raises:
            RuntimeError: traced in a `tf.function` before any gradient was added.
        """
        if not self._variables:
            if not tf.executing_eagerly():
                raise RuntimeError(_validate.empty_apply_message())
            return
        variables = self._variables
        _strategy.build_optimizer(optimizer, variables)
        counts = tf.logical_and(_condition, tf.greater(self.num_microbatches, 0))
        if not self._is_sum:
            counts = tf.logical_and(counts, tf.not_equal(self._total, 0.0))
        _strategy.update_if(counts, lambda: optimizer.apply(self.mean(), variables))
        self._reset(_condition)

    def reset(self) -> None:
        """Forget the open window. The buffers stay allocated."""
        self._reset(True)

    def _reset(self, condition: Any) -> None:
        for state in (self.num_microbatches, self._total, self._unit):
            state.assign(tf.where(condition, tf.zeros_like(state), state))

    def _check(self, gradients: Sequence[Any], variables: Sequence[Any], is_sum: bool) -> None:
        if len(gradients) != len(variables):
            raise ValueError(
                "`gradients` and `variables` must have the same length. "
                f"Received: {len(gradients)} gradients and {len(variables)} variables."
            )
        if not self._variables:
            self._variables = list(variables)
            self._is_sum = is_sum
            self._buffers = [
                None if gradient is None else _make_buffer(variable)
                for gradient, variable in zip(gradients, variables)
            ]
            return
        if [id(v) for v in variables] != [id(v) for v in self._variables]:
            raise ValueError(_validate.unknown_variables_message())
        if is_sum != self._is_sum:
            raise ValueError(_validate.mixed_weights_message())
        late = [
            getattr(variable, "path", variable.name)
            for variable, gradient, buffer in zip(variables, gradients, self._buffers)
            if gradient is not None and buffer is None
        ]
        if late:
            raise RuntimeError(_validate.late_gradient_message(late))


def _make_buffer(variable: Any) -> tf.Variable:
    dtype = tf.as_dtype(variable.dtype)
    if dtype in (tf.float16, tf.bfloat16):
        dtype = tf.float32
    return _strategy.make_variable(variable.shape, dtype)


def _scale(gradient: Any, factor: tf.Tensor) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _scale(gradient.values, factor), gradient.indices, gradient.dense_shape
        )
    gradient = tf.convert_to_tensor(gradient)
    if gradient.dtype in (tf.float16, tf.bfloat16):
        gradient = tf.cast(gradient, tf.float32)
    return gradient * tf.cast(factor, gradient.dtype)


def _constant(weight: Any) -> tf.Tensor:
    """A weight counts; it is nothing to differentiate, whatever it was computed from."""
    if isinstance(weight, (int, float)):  # `tf.cast` would take it through float32
        return tf.constant(weight, tf.float64)
    return tf.stop_gradient(tf.cast(weight, tf.float64))


def _assign(buffer: tf.Variable, gradient: Any) -> None:
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        buffer.assign(tf.zeros_like(buffer))
        _assign_add(buffer, gradient)
    else:
        buffer.assign(tf.cast(gradient, buffer.dtype))


def _assign_add(buffer: tf.Variable, gradient: Any) -> None:
    if gradient is None:
        return
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, buffer.dtype)
        buffer.scatter_add(tf.IndexedSlices(values, gradient.indices))
    else:
        buffer.assign_add(tf.cast(gradient, buffer.dtype))
