"""The public sum of gradients on JAX, for custom training loops."""

from __future__ import annotations

from typing import Any

import jax
import keras

from ga_model.base._names import suggests_argument_names
from ga_model.core.accumulator import Accumulator, added


class GradientAccumulator(Accumulator):
    """Sums weighted gradients over microbatches and applies their mean to an optimizer.

    The same class as on TensorFlow, for the JAX backend. It has state, so call it outside of
    functions that `jax.jit` compiles, with the gradients that these return. There is one buffer per
    variable: float32 for float16 and bfloat16 variables, otherwise the gradient's dtype.

    If your loop keeps weights outside of the variables, take the window's gradient from `mean`,
    pass it to `optimizer.stateless_apply`, and call `reset`.

    Attributes:
        num_microbatches: int, number of microbatches added since the last reset.

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

    _tensor_type = jax.Array
    _source = "what `jax.grad` returns for it"
    _added = staticmethod(jax.jit(added, donate_argnums=0))

    @suggests_argument_names
    def __init__(self) -> None:
        super().__init__()

    def _tensor(self, gradient: Any, variable: keras.Variable) -> jax.Array | None:
        _check_not_compiled(gradient)
        return super()._tensor(gradient, variable)

    def _number(self, weight: Any) -> float:
        _check_not_compiled(weight)
        return super()._number(weight)


def _check_not_compiled(value: Any) -> None:
    """Raise TypeError if a value is a tracer."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            "On JAX, a `GradientAccumulator` has state, which a function that `jax.jit` compiles "
            "cannot change. Received: `add` in such a function. Return the gradients from it, and "
            "add them outside; or carry their weighted sum through your function as an argument."
        )
