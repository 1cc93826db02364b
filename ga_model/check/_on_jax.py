"""What the check needs from JAX. `_on_tensorflow` has the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from ga_model.base._internals import mask_of, raw, set_mask
from ga_model.check._on_one_device import AllVariables, as_tensor, build, part_of, scope

__all__ = ["AllVariables", "as_tensor", "build", "part_of", "scope"]

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


def trains_alone(model: Any) -> bool:
    """Return whether one device trains a model."""
    return keras.distribution.distribution() is None


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
