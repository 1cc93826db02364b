"""What the check needs alike from PyTorch and JAX. `_on_tensorflow` has the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np


def scope(model: Any) -> Any:
    """Return the scope in which a model was made: there is none."""
    return contextlib.nullcontext()


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
