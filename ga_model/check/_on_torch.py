"""What the check needs from PyTorch. `_on_tensorflow` has the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import torch

from ga_model.backends.torch import random_numbers
from ga_model.base._internals import mask_of, raw, set_mask

random_state = random_numbers.random_state
set_random_state = random_numbers.set_random_state

# Where rounding hides everything else.
MORE_EXACT = (
    "Keras has no float64 on PyTorch: check with KERAS_BACKEND=tensorflow in float64, if the model "
    "trains there."
)


def scope(model: Any) -> Any:
    """Return the scope in which a model was made: there is none."""
    return contextlib.nullcontext()


def trains_alone(model: Any) -> bool:
    """Return whether one process trains a model."""
    return getattr(model, "process_group", None) is None


def part_of(array: Any, begin: int, end: int) -> Any:
    """Return the samples of an array from `begin` up to `end`."""
    return None if array is None else array[begin:end]


def as_tensor(array: Any) -> Any:
    """Return what Keras makes of an array: floating-point numbers have its `floatx`."""
    if array is None or torch.is_tensor(array):
        return array
    array = np.asarray(array)
    dtype = keras.config.floatx() if array.dtype.kind == "f" else array.dtype
    return keras.ops.convert_to_tensor(array.astype(dtype))


def build(model: Any, data: Any) -> bool:
    """Make variables without a step of training. What else a step uses is not known."""
    if not model.built:
        with contextlib.suppress(NotImplementedError), torch.no_grad():  # if it has no `call`
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
