"""Sum gradients in custom training loops that run eagerly: the base of `GradientAccumulator`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from ga_model.base import _numbers, _validate
from ga_model.base._internals import raw
from ga_model.base._types import Gradient, Nest, Scalar, Tensor
from ga_model.core import messages
from ga_model.core.window import Sums, shrunk


class Accumulator:
    """Sum of the weighted gradients of microbatches. Weights are Python numbers.

    Attributes:
        variables: variables of the summed gradients; empty before the first `add`.
        num_microbatches: integer, microbatches added since the last reset.
    """

    _tensor_type: type | tuple[type, ...]
    _source: str  # where users get gradients, for error messages
    # `added`, as the backend runs it (compiled, for example)
    _added: Callable[[list[Gradient], list[Gradient], Scalar, Scalar], list[Gradient]]

    variables: list[keras.Variable]
    num_microbatches: Scalar
    _sums: Sums | Nest | None  # on TensorFlow, a nest of variables

    def __init__(self) -> None:
        self.reset()

    def add(
        self,
        gradients: Collection[Gradient],
        variables: Collection[keras.Variable],
        *,
        weight: Scalar | None,
    ) -> None:
        """Add the gradients of one microbatch to the window.

        Args:
            gradients: one gradient per variable: a tensor or array of its shape, or None.
            variables: the variables, the same in the same order in every call.
            weight: scalar number or tensor, the denominator of the microbatch's loss: the number of
                samples for a mean over samples, of tokens for a mean over tokens. A microbatch with
                weight 0 changes nothing. None in every call for a loss that is a sum: gradients are
                then summed and not divided.

        Raises:
            TypeError: if the arguments are not lists or not variables, a gradient is not a tensor
                or array of real numbers, or a function compiled by `jax.jit` calls this.
            ValueError: if lengths or shapes differ, the variables are not those of the first call,
                or `weight` is not a scalar number, or is None in one call and a number in another.
        """
        if not (_is_list(gradients) and _is_list(variables)):
            types = [f"{type(value).__name__!r}" for value in (gradients, variables)]
            raise TypeError(_lengths_message(*types))
        gradients, variables = list(gradients), list(variables)
        if non_variables := [type(v).__name__ for v in variables if not hasattr(v, "assign")]:
            raise TypeError(_no_variables_message(non_variables))
        if len(gradients) != len(variables):
            counts = [f"{len(gradients)} gradients", f"{len(variables)} variables"]
            raise ValueError(_lengths_message(*counts))
        gradients = [self._tensor(gradient, v) for gradient, v in zip(gradients, variables)]
        for gradient, variable in zip(gradients, variables):
            if gradient is not None and tuple(gradient.shape) != tuple(variable.shape):
                raise ValueError(_shape_message(gradient, variable))
        if self.variables and [id(v) for v in self.variables] != [id(v) for v in variables]:
            raise ValueError(_other_variables_message())
        self._add(gradients, variables, None if weight is None else self._number(weight))

    def _add(
        self, gradients: list[Gradient], variables: list[keras.Variable], weight: Scalar
    ) -> None:
        """Add validated gradients. `weight` comes from `_number`, or is None."""
        is_sum = weight is None
        sums = self._sums or Sums.of_nothing(len(variables), is_sum)
        if (sums.total is None) != is_sum:
            raise ValueError(messages.mixed_weights_message())
        self.variables = self.variables or variables
        self.num_microbatches += 1
        totals = [
            nothing(g.shape, _numbers.sum_dtype(g.dtype)) if s is None is not g else s
            for s, g in zip(sums.gradients, gradients)
        ]
        sums = sums._replace(gradients=totals, num_counted=sums.num_counted + 1)
        if is_sum or weight:  # gradients of weight 0 may be NaN
            number = 1.0 if is_sum else weight
            unit = max(sums.unit, abs(number))  # keeps a window of one microbatch bit-exact
            relative, shrink = number / unit, sums.unit / unit if sums.unit else 1.0
            sums = sums._replace(
                gradients=self._added(totals, gradients, relative, shrink),
                total=None if is_sum else sums.total * shrink + relative,
                unit=unit,
            )
        self._sums = sums

    def mean(self) -> list[Gradient]:
        """Return the window's gradient: one tensor or None per variable, in its dtype.

        It is sum(w_i * g_i) / sum(w_i), or sum(g_i) if weights are None. Not finite if weights sum
        to 0.
        """
        if (sums := self._sums) is None:
            return []
        total = 1.0 if sums.total is None else sums.total
        pairs = zip(sums.gradients, self.variables)
        return [None if s is None else ops.cast(s / total, v.dtype) for s, v in pairs]

    def apply(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Update the variables with the window's gradient, and start the next window.

        One call is one `optimizer.apply`, so iterations, schedules, weight decay, clipping,
        constraints and moving averages advance once. A window that is empty, or whose weights sum
        to zero, changes nothing.

        Args:
            optimizer: a `keras.optimizers.Optimizer`.

        Raises:
            TypeError: if `optimizer` is not an optimizer.
            ValueError: if the optimizer has `gradient_accumulation_steps`.
            RuntimeError: if a `tf.function` traces this before any gradient was added.
        """
        check_optimizer(optimizer)
        self._update(optimizer, self._sums, self.variables)
        self.reset()

    def _update(
        self,
        optimizer: keras.optimizers.Optimizer,
        sums: Sums | None,
        variables: list[keras.Variable],
    ) -> None:
        """Apply the optimizer to the sums, consuming them, unless their total weight is zero."""
        if sums is not None and sums.total != 0.0:
            optimizer.apply(sums.mean(variables), variables)

    def __repr__(self) -> str:
        number, variables = int(self.num_microbatches), len(self.variables)
        return f"<GradientAccumulator: {number} microbatches, {variables} variables>"

    def reset(self) -> None:
        """Discard the open window."""
        self.variables, self.num_microbatches = [], 0
        self._sums = None

    def _tensor(self, gradient: Any, variable: keras.Variable) -> Gradient:
        """Return a gradient as a tensor, or None, or raise TypeError.

        Arrays are converted to the dtype in which the variable's gradients are summed.
        """
        gradient = raw(gradient)
        if gradient is None or isinstance(gradient, self._tensor_type):
            return gradient
        try:
            array = np.asarray(gradient)
            if array.dtype.kind in "OUSc":
                raise TypeError
            return ops.convert_to_tensor(array.astype(_numbers.sum_dtype(variable.dtype)))
        except (TypeError, ValueError):
            message = _gradient_message(gradient, variable, self._source)
            raise TypeError(message) from None

    def _number(self, weight: Any) -> float:
        """Return a weight as a float, or raise ValueError."""
        weight = raw(weight)
        is_tensor = isinstance(weight, self._tensor_type)
        try:
            is_text = not is_tensor and np.asarray(weight).dtype.kind in "SU"
            if is_text or len(getattr(weight, "shape", ())) > 0:
                raise TypeError
            return float(ops.stop_gradient(weight) if is_tensor else weight)
        except (TypeError, ValueError):
            raise ValueError(messages.weight_message(weight)) from None


def added(
    sums: list[Gradient], gradients: list[Gradient], weight: Scalar, shrink: Scalar
) -> list[Gradient]:
    """Return `sum * shrink + gradient * weight` for each sum, consuming the sums."""

    def add(total: Gradient, gradient: Gradient) -> Gradient:
        if gradient is None:
            return shrunk(total, shrink)
        weighted = ops.cast(gradient, total.dtype) * _numbers.like(total, weight)
        return _numbers.added(total, weighted, shrink)

    return list(map(add, sums, gradients))


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError if this is not an optimizer, and ValueError if it accumulates gradients."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(_not_an_optimizer_message(optimizer))
    _validate.check_single_accumulation([optimizer])


def nothing(shape: Sequence[int], dtype: Any) -> Tensor:
    """Return the initial sum, -0.0: unlike 0.0, adding a zero to it keeps the sign of that zero.

    TensorFlow may return the constant 0.0 for -0.0 from its cache, hence the negation.
    """
    return ops.negative(ops.zeros(shape, dtype))


def _is_list(values: Any) -> bool:
    """Return whether this is a list-like collection: a list, a tuple, a dict's values."""
    return isinstance(values, Collection) and not isinstance(values, (str, Mapping))


def _lengths_message(gradients: str, variables: str) -> str:
    return (
        "`add` takes two lists of equal length: one gradient for each variable. "
        f"Received: {gradients} and {variables}. "
        "Pass the gradients of a loss with respect to `variables`, in the same order."
    )


def _no_variables_message(types: list[str]) -> str:
    return (
        "`variables` must be variables of TensorFlow or Keras. "
        f"Received: {len(types)} values of type {', '.join(dict.fromkeys(types))}. "
        "Pass the gradients first and the variables second."
    )


def _shape_message(gradient: Tensor, variable: keras.Variable) -> str:
    return (
        "A gradient must have the shape of its variable. "
        f"Received: shape {tuple(gradient.shape)} for {messages.path_of(variable)!r} of shape "
        f"{tuple(variable.shape)}. Pass gradients and variables in the same order."
    )


def _other_variables_message() -> str:
    return (
        "All gradients of a `GradientAccumulator` must belong to the same variables, in the same "
        "order. Received: different variables. Create one for each list of variables."
    )


def _not_an_optimizer_message(value: Any) -> str:
    hint = "Call the class first" if isinstance(value, type) else "Create one"
    return (
        "`GradientAccumulator.apply` takes a Keras optimizer. "
        f"Received: optimizer={value!r} (of type {type(value).__name__}). "
        f"{hint}: `keras.optimizers.Adam()`, for example."
    )


def _gradient_message(gradient: Any, variable: keras.Variable, source: str) -> str:
    return (
        "A gradient must be a tensor, an array of real numbers or None. "
        f"Received: a {type(gradient).__name__} for {messages.path_of(variable)!r}. Pass {source}, "
        "or its values as a NumPy array."
    )
