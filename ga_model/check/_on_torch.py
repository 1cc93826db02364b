"""What the check needs from PyTorch. `_on_tensorflow` has the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch

from ga_model.backends.torch import random_numbers
from ga_model.base._internals import mask_of, raw, set_mask
from ga_model.check import _on_one_device
from ga_model.check._on_one_device import AllVariables, part_of, scope

__all__ = ["AllVariables", "part_of", "scope"]

random_state = random_numbers.random_state
set_random_state = random_numbers.set_random_state

# Where rounding hides everything else.
MORE_EXACT = (
    "Keras has no float64 on PyTorch: check with KERAS_BACKEND=tensorflow in float64, if the model "
    "trains there."
)


def trains_alone(model: Any) -> bool:
    """Return whether one process trains a model."""
    return getattr(model, "process_group", None) is None


def as_tensor(array: Any) -> Any:
    """Return what Keras makes of an array: floating-point numbers have its `floatx`."""
    return array if torch.is_tensor(array) else _on_one_device.as_tensor(array)


def build(model: Any, data: Any) -> bool:
    """Make variables without a step of training. What else a step uses is not known."""
    with torch.no_grad():
        return _on_one_device.build(model, data)


def gradients(loss_of: Callable[[Any], Any], outputs: Any) -> list[Any]:
    """Return the gradients of a loss with respect to outputs, each a tensor or None.

    Args:
        loss_of: takes the outputs.
        outputs: a nest of tensors.
    """
    outputs = keras.tree.map_structure(_copy, outputs)
    leaves = keras.tree.flatten(outputs)
    return list(torch.autograd.grad(loss_of(outputs), leaves, allow_unused=True))


def _copy(output: Any) -> Any:
    copy = output.detach().clone().requires_grad_(output.is_floating_point())
    if (mask := mask_of(output)) is not None:
        set_mask(copy, mask)
    return copy


def value_of(variable: Any) -> Any:
    """Return the value of a variable, which does not change with it."""
    return np.array(keras.ops.convert_to_numpy(raw(variable)))
