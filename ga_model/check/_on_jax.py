"""What the check needs from JAX. `_on_tensorflow` has the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import keras
import numpy as np

from ga_model.base._internals import mask_of, raw, set_mask

# Where rounding hides everything else.
MORE_EXACT = (
    "Keras has no float64 on JAX: check with KERAS_BACKEND=tensorflow in float64, if the model "
    "trains there."
)


def random_state() -> Any:
    """Return the state of JAX's random numbers: there is none."""
    return None


def set_random_state(state: Any) -> None:
    """Do nothing."""


def scope(model: Any) -> Any:
    """Return the scope in which a model was made: there is none."""
    return contextlib.nullcontext()


def trains_alone(model: Any) -> bool:
    """Return whether one device trains a model."""
    return keras.distribution.distribution() is None


def part_of(array: Any, begin: int, end: int) -> Any:
    """Return the samples of an array from `begin` up to `end`."""
    return None if array is None else array[begin:end]


def as_tensor(array: Any) -> Any:
    """Return what Keras makes of an array: floating-point numbers have its `floatx`."""
    if array is None:
        return None
    array = np.asarray(array)
    dtype = keras.config.floatx() if array.dtype.kind == "f" else array.dtype
    return keras.ops.convert_to_tensor(array.astype(dtype))


def build(model: Any, data: Any) -> bool:
    """Make variables without a step of training. What else a step uses is not known."""
    if not model.built:
        with contextlib.suppress(NotImplementedError):  # if it has no `call`
            model(data[0])
    if model.optimizer is not None and model.built and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return False


class AllVariables:
    """Nothing: no variables are known here but those of the model and its optimizers.

    Args:
        but: variables that are known.
    """

    def __init__(self, but: Iterable[Any]) -> None:
        pass

    def with_new(self) -> Any:
        return contextlib.nullcontext()

    def put_back(self) -> None:
        pass


def gradients(loss_of: Callable[[Any], Any], outputs: Any) -> list[Any]:
    """Return the gradients of a loss with respect to outputs, each an array or None.

    Args:
        loss_of: takes the outputs.
        outputs: a nest of arrays.
    """
    leaves = keras.tree.flatten(outputs)
    masks = [mask_of(leaf) for leaf in leaves]

    def loss_of_leaves(values: list[Any]) -> Any:
        for value, mask in zip(values, masks):
            if mask is not None:
                set_mask(value, mask)
        return loss_of(keras.tree.pack_sequence_as(outputs, values))

    return list(jax.grad(loss_of_leaves, allow_int=True)(leaves))


def value_of(variable: Any) -> Any:
    """Return the value of a variable, which does not change with it."""
    return np.array(raw(variable))
