"""The sum of gradients that users see: for training loops of their own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from ga_model.base import _messages, _validate
from ga_model.base._names import answering
from ga_model.sums import _sums
from ga_model.sums._sums import GradientSum
from ga_model.sums._window_sum import WindowSum


class GradientAccumulator:
    """Sums weighted gradients over microbatches and applies their mean to an optimizer.

    Use it in a training loop of your own: the windows of `fit` sum in the same way. It works inside
    and outside of `tf.function`, but `add` not with sparse gradients in one that XLA compiles. The
    update equals that of the optimizer on the whole window when each weight says how much its
    microbatch counts in the loss's mean: the number of rows for a mean over rows, the number of
    valid tokens for a mean over tokens.

    There is one buffer per variable that has a gradient, made by the first `add`: float32 for
    float16 and bfloat16 variables, else the variable's own dtype. A variable whose gradients are
    None is handed to the optimizer with None. For a variable with `overwrite_with_gradient`, such
    as a float8 layer's scale, the largest value counts.

    Of `tf.IndexedSlices` the rows are kept one behind the other; where they outnumber the
    variable's by more than a quarter, those of equal indices are summed, and adaptive optimizers
    and clipping differ from the full batch: see `summed_variables`. Rows whose indices do not come
    from the samples, such as those of positions, are added one by one, as the full batch has each
    of them once. For that, take the gradients and call `add` in one `tf.function` that gets the
    samples as arguments: eagerly, it is not known what indices come from.

    Under a `tf.distribute` strategy make it in the strategy's scope and call `add` in
    `strategy.run`, with the gradients that `optimizer.apply` would take there: of a loss that is
    divided by the number of replicas, as Keras's losses are. Replicas communicate in `apply` only,
    which may be called there or outside.

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

    @answering
    def __init__(self) -> None:
        self._sum = WindowSum()
        self.num_microbatches = self._sum.num_microbatches
        self._tells = True  # whether `apply` warns

    def add(
        self, gradients: Collection[Any], variables: Collection[Any], *, weight: Any | None
    ) -> None:
        """Add the gradients of one microbatch to the window.

        Args:
            gradients: one per variable: a tensor of its shape, `tf.IndexedSlices` or None.
            variables: the variables, the same ones in the same order in every call.
            weight: scalar number or tensor, what the microbatch counts in the window's mean (rows,
                or tokens, of a loss that is their mean). It has to be said: microbatches of unlike
                sizes that count alike are not the mean of the window. Zero changes nothing. None in
                every call for a loss that is a sum: the gradients are then summed and not divided.
                (In a graph `x.shape[0]` may be None, and `tf.shape(x)[0]` is not.)

        Raises:
            TypeError: these are no lists or the like, or no variables.
            ValueError: the lengths differ, or in the first call the shapes; the variables are not
                those of the first call; `weight` is no scalar number, or None in one call and a
                number in another; or the accumulator was made under another strategy, or is
                called outside of `strategy.run`.
            RuntimeError: a variable whose gradient was None at first has one now.
        """
        if not (_validate.is_list(gradients) and _validate.is_list(variables)):
            types = [f"{type(value).__name__!r}" for value in (gradients, variables)]
            raise TypeError(_messages.lengths_message(*types))
        gradients, variables = list(gradients), list(variables)
        is_sum = weight is None
        if not (is_sum or _is_scalar_number(weight)):
            raise ValueError(_messages.weight_message(weight))
        in_unit = _sums.in_unit(1.0 if is_sum else weight, self._sum.unit)
        part = GradientSum.of(gradients, variables, in_unit, scale=not is_sum)
        self._sum.add(part, variables, None if is_sum else 0.0)

    @property
    def variables(self) -> list[Any]:
        """The variables whose gradients are summed; none before the first `add`."""
        return list(self._sum.variables)

    @property
    def summed_variables(self) -> list[Any]:
        """Those of the variables whose rows were summed in a window so far, to bound the memory.

        What SGD without clipping makes of them is the same. Other optimizers treat each row of a
        sparse gradient by itself: their updates then are not those of the full batch. `apply` warns
        of it where it is called eagerly.
        """
        return self._sum.summed_variables()

    def mean(self) -> list[Any]:
        """Return the window's gradient, in the variables' dtypes.

        One per variable: a tensor, `tf.IndexedSlices` or None, as the first that was added.

        That is sum(w_i * g_i) / sum(w_i), or sum(g_i) where the weights are None. Not finite where
        the weights sum to zero. With several replicas, the replica's share of it: the shares add up
        to the window's gradient, as optimizers add them up.

        Raises:
            ValueError: with several replicas, called outside of `strategy.run`.
        """
        return self._sum.mean()

    def apply(self, optimizer: Any) -> None:
        """Update the variables with the window's gradient, and start the next window.

        One call is one `optimizer.apply`, so iterations, schedules, weight decay, clipping,
        constraints and moving averages advance once. An empty window, and one whose weights sum to
        zero, changes nothing.

        Args:
            optimizer: a `keras.optimizers.Optimizer`.

        Raises:
            TypeError: `optimizer` is none.
            ValueError: it accumulates gradients itself.
            RuntimeError: traced in a `tf.function` before any gradient was added.
        """
        if isinstance(optimizer, type) or not hasattr(optimizer, "apply"):
            raise TypeError(_messages.not_an_optimizer_message(optimizer))
        _validate.check_single_accumulation([optimizer])
        if not self._sum.variables:
            if not tf.executing_eagerly():
                raise RuntimeError(_empty_apply_message())
            return
        self._sum.update(optimizer)
        if self._tells and tf.executing_eagerly():
            for message in self._sum.messages(optimizer):
                self._tells = False
                _validate.warn(message)

    def __repr__(self) -> str:
        number, variables = int(self.num_microbatches), len(self._sum.variables)
        return f"<GradientAccumulator: {number} microbatches, {variables} variables>"

    def reset(self) -> None:
        """Forget the open window. Dense buffers stay allocated."""
        self._sum.reset()


def _is_scalar_number(weight: Any) -> bool:
    """Return whether a weight is one, as far as that is known without its value."""
    if isinstance(weight, (int, float)):
        return True
    try:
        tensor = tf.convert_to_tensor(weight)
    except (TypeError, ValueError):
        return False
    dtype = tensor.dtype
    return not tensor.shape.rank and (dtype.is_floating or dtype.is_integer or dtype.is_bool)


def _empty_apply_message() -> str:
    return (
        "`GradientAccumulator.apply()` must know its variables when a `tf.function` traces it. "
        "Received: a call that was traced before any gradient was added. "
        "Call `add()` once before `apply()` is traced, or put both into the same `tf.function`."
    )
