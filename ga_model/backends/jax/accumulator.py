"""The public sum of gradients on JAX, for custom training loops."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from ga_model.base import _messages, _validate
from ga_model.base._names import answering


class GradientAccumulator:
    """Sums weighted gradients over microbatches and applies their mean to an optimizer.

    The same class as on TensorFlow, for the JAX backend. It has state, so use it between functions
    that `jax.jit` compiles, and not inside one: what they return are arrays that it adds up. There
    is one buffer per variable: float32 for float16 and bfloat16 variables, otherwise the
    gradient's dtype.

    In a loop that keeps weights outside of the variables, take the window's gradient from `mean`,
    pass it to `optimizer.stateless_apply`, and call `reset`.

    Attributes:
        num_microbatches: an integer, microbatches added since the last reset.

    Example:

    ```python
    optimizer = keras.optimizers.Adam()
    accumulator = GradientAccumulator()
    variables = model.trainable_variables

    @jax.jit
    @jax.grad
    def gradients_of(weights, x, y):
        outputs, _ = model.stateless_call(weights, [], x, training=True)
        return jax.numpy.mean(jax.numpy.square(outputs - y))

    for step, (x, y) in enumerate(batches, start=1):
        gradients = gradients_of([v.value for v in variables], x, y)
        accumulator.add(gradients, variables, weight=len(x))
        if step % 4 == 0:
            accumulator.apply(optimizer)
    accumulator.apply(optimizer)  # the rest of the epoch; an empty window changes nothing
    ```
    """

    @answering
    def __init__(self) -> None:
        self.variables: list[Any] = []
        self.num_microbatches = 0
        self._sums: list[Any] = []
        self._unit = self._total = 0.0  # the first weight, and the sum of all weights in that unit
        self._is_sum: bool | None = None

    def add(
        self, gradients: Collection[Any], variables: Collection[Any], *, weight: Any | None
    ) -> None:
        """Add the gradients of one microbatch to the window.

        Args:
            gradients: one per variable: an array of its shape, or None.
            variables: the variables, the same ones in the same order in every call.
            weight: scalar number or array, what the microbatch's loss is divided by: the number of
                samples for a mean over samples, of tokens for a mean over tokens. A microbatch with
                weight 0 changes nothing. None in every call for a loss that is a sum: gradients are
                then summed and not divided.

        Raises:
            TypeError: these are not lists, or not variables; a gradient is no array of real
                numbers; or it runs in a function that `jax.jit` compiles.
            ValueError: the lengths or shapes differ; the variables are not those of the first call;
                `weight` is not a scalar number, or None in one call and a number in another.
        """
        if not (_validate.is_list(gradients) and _validate.is_list(variables)):
            types = [f"{type(value).__name__!r}" for value in (gradients, variables)]
            raise TypeError(_messages.lengths_message(*types))
        gradients, variables = list(gradients), list(variables)
        _validate.check_variables(variables)
        _validate.check_lengths(gradients, variables)
        if any(isinstance(value, jax.core.Tracer) for value in (*gradients, weight)):
            raise TypeError(_compiled_message())
        gradients = [_array(gradient, v) for gradient, v in zip(gradients, variables)]
        _validate.check_shapes(gradients, variables)
        _validate.check_same_variables(self.variables, variables)
        is_sum = weight is None
        if self._is_sum not in (None, is_sum):
            raise ValueError(_messages.mixed_weights_message())
        number = 1.0 if is_sum else _number(weight)
        if not self.variables:
            self.variables, self._sums = variables, [None] * len(variables)
        pairs = zip(gradients, self._sums)
        self._sums = [_nothing(g) if s is None is not g else s for g, s in pairs]
        self._is_sum = is_sum
        self.num_microbatches += 1
        if number:  # of one without weight gradients may be NaN
            self._unit = self._unit or number
            relative = number / self._unit  # 1 in a window of one, which is its gradient to the bit
            self._sums = _added(self._sums, gradients, relative)
            self._total += relative

    @property
    def summed_variables(self) -> list[Any]:
        """Variables whose rows were summed to bound the memory: none, as there are no rows."""
        return []

    def mean(self) -> list[Any]:
        """Return the window's gradient, one array or None per variable, in its dtype.

        That is sum(w_i * g_i) / sum(w_i), or sum(g_i) where the weights are None. Not finite where
        the weights sum to zero.
        """
        total = 1.0 if self._is_sum else self._total
        pairs = zip(self._sums, self.variables)
        return [None if s is None else (s / total).astype(v.dtype) for s, v in pairs]

    def apply(self, optimizer: Any) -> None:
        """Update the variables with the window's gradient, and start the next window.

        One call is one `optimizer.apply`. An empty window, and one whose weights sum to zero,
        changes nothing.

        Args:
            optimizer: a `keras.optimizers.Optimizer`.

        Raises:
            TypeError: `optimizer` is not an optimizer.
            ValueError: the optimizer has `gradient_accumulation_steps`.
        """
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(_messages.not_an_optimizer_message(optimizer))
        _validate.check_single_accumulation([optimizer])
        if self.variables and (self._is_sum or self._total):
            optimizer.apply(self.mean(), self.variables)
        self.reset()

    def __repr__(self) -> str:
        number, variables = self.num_microbatches, len(self.variables)
        return f"<GradientAccumulator: {number} microbatches, {variables} variables>"

    def reset(self) -> None:
        """Forget the open window."""
        self.variables, self._sums, self._is_sum = [], [], None
        self.num_microbatches, self._unit, self._total = 0, 0.0, 0.0


@functools.partial(jax.jit, donate_argnums=0)
def _added(sums: list[Any], gradients: list[Any], weight: Any) -> list[Any]:
    return [
        s if g is None else s + g.astype(s.dtype) * jnp.asarray(weight, s.dtype)
        for s, g in zip(sums, gradients)
    ]


def _array(gradient: Any, variable: Any) -> Any:
    """Return the gradient of a variable as an array, or None, or raise TypeError."""
    if gradient is None or isinstance(gradient, jax.Array):
        return gradient
    try:
        array = np.asarray(gradient)
        if array.dtype.kind in "OUSc":
            raise TypeError
        return jnp.asarray(array, jnp.promote_types(variable.dtype, jnp.float32))
    except (TypeError, ValueError):
        source = "what `jax.grad` returns for it"
        raise TypeError(_messages.gradient_message(gradient, variable, source)) from None


def _nothing(gradient: Any) -> Any:
    """Return what a sum begins with: -0.0, which changes the sign of no zero."""
    return jnp.full(gradient.shape, -0.0, jnp.promote_types(gradient.dtype, jnp.float32))


def _number(weight: Any) -> float:
    """Return a weight as a float, or raise ValueError."""
    is_scalar = not isinstance(weight, str) and len(getattr(weight, "shape", ())) == 0
    try:
        if not is_scalar:
            raise TypeError
        return float(weight)
    except (TypeError, ValueError):
        raise ValueError(_messages.weight_message(weight)) from None


def _compiled_message() -> str:
    return (
        "On JAX, a `GradientAccumulator` has state, which a function that `jax.jit` compiles "
        "cannot change. Received: `add` in such a function. Return the gradients from it, and add "
        "them outside; or carry their weighted sum through your function as an argument."
    )
