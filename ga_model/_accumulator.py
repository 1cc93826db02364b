"""The public sum of gradients, for custom training loops."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf

from ga_model.base import _messages, _validate
from ga_model.base._names import answering
from ga_model.replicas import _optimizers
from ga_model.sums import _sums
from ga_model.sums._sums import GradientSum
from ga_model.sums._window_sum import WindowSum


class GradientAccumulator:
    """Sums weighted gradients over microbatches and applies their mean to an optimizer.

    Use it in your own training loop; `fit` sums windows in the same way. It works inside and
    outside `tf.function` (but `add` not with sparse gradients under XLA). The update equals that of
    the optimizer on the full batch if each weight is what the microbatch's loss is divided by: the
    number of samples for a mean over samples, the number of valid tokens for a mean over tokens.

    The first `add` creates one buffer per variable that has a gradient: float32 for float16 and
    bfloat16 variables, otherwise the variable's dtype. A variable whose gradients are None is
    passed to the optimizer with None. For a variable with `overwrite_with_gradient`, such as the
    scale of a float8 layer, the largest value is used.

    The rows of `tf.IndexedSlices` are concatenated. If they are more than 1.25 times the rows of
    the variable, rows with equal indices are summed, and adaptive optimizers and clipping differ
    from the full batch: see `summed_variables`. Rows whose indices do not depend on the samples,
    such as positions, are added element by element, because the full batch has each of them once.
    For this, take the gradients and call `add` in one `tf.function` that gets the samples as
    arguments: in eager mode, it is unknown where indices come from.

    Under a `tf.distribute` strategy, create it in the strategy's scope and call `add` in
    `strategy.run`, with the gradients that you would pass to `optimizer.apply` there: those of a
    loss that is divided by the number of replicas, as Keras losses are. Replicas communicate only
    in `apply`, which may be called there or outside.

    Attributes:
        num_microbatches: int64 scalar variable, microbatches added since the last update or reset.

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
            weight: scalar number or tensor, what the microbatch's loss is divided by: the number of
                samples for a mean over samples, of tokens for a mean over tokens. It is required,
                because microbatches of different sizes must not have the same weight. A microbatch
                with weight 0 is skipped. If the loss is a sum, pass None in every call: gradients
                are then summed and not divided. (In a graph, use `tf.shape(x)[0]`; `x.shape[0]` may
                be None.)

        Raises:
            TypeError: `gradients` or `variables` is not a list, or these are not variables.
            ValueError: the lengths differ, or in the first call the shapes; the variables differ
                from those of the first call; `weight` is not a scalar number, or None in one call
                and a number in another; or the accumulator is used under a different strategy than
                it was created in, or outside `strategy.run`.
            RuntimeError: a variable has a gradient, but had none in the first call.
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
        """Variables whose rows were summed in some window, to limit memory.

        For SGD without clipping this makes no difference. Other optimizers treat each row of a
        sparse gradient separately, so their updates differ from the full batch. `apply` warns about
        it when called eagerly.
        """
        return self._sum.summed_variables()

    def mean(self) -> list[Any]:
        """Return the window's gradient, in the variables' dtypes.

        One per variable: a tensor, `tf.IndexedSlices` or None, like the first that was added.

        This is sum(w_i * g_i) / sum(w_i), or sum(g_i) if the weights are None. It is not finite if
        the weights sum to zero. With several replicas, it is the share of this replica; optimizers
        add up the shares.

        Raises:
            ValueError: with several replicas, called outside `strategy.run`.
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
            TypeError: `optimizer` is not an optimizer.
            ValueError: the optimizer has `gradient_accumulation_steps`.
            RuntimeError: traced in a `tf.function` before any gradient was added.
        """
        if isinstance(optimizer, type) or not hasattr(optimizer, "apply"):
            raise TypeError(_messages.not_an_optimizer_message(optimizer))
        _validate.check_single_accumulation([optimizer])
        if not self._sum.variables:
            if not tf.executing_eagerly():
                raise RuntimeError(_empty_apply_message())
            return
        self._sum.in_pairs = _optimizers.overrides_pairs(optimizer)
        self._sum.update(optimizer)
        if self._tells and tf.executing_eagerly():
            for message in self._sum.messages(optimizer):
                self._tells = False
                _validate.warn(message)

    def __repr__(self) -> str:
        number, variables = int(self.num_microbatches), len(self._sum.variables)
        return f"<GradientAccumulator: {number} microbatches, {variables} variables>"

    def reset(self) -> None:
        """Discard the open window. Dense buffers stay allocated."""
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
