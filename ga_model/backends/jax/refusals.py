"""What is not supported on the JAX backend: checks, errors and warnings."""

from __future__ import annotations

from typing import Any

import jax
import keras

from ga_model.base._internals import overwrites
from ga_model.core.messages import WITHOUT

_OTHERS = (
    "use the TensorFlow backend (`KERAS_BACKEND=tensorflow`) or PyTorch (`KERAS_BACKEND=torch`), "
    "which support it"
)


def check(model: Any) -> None:
    """Raise ValueError if a model cannot be accumulated here."""
    overwritten = [v.path for v in model.trainable_variables if overwrites(v)]
    if overwritten:
        raise ValueError(_overwritten_message(model.name, overwritten))
    distribution = keras.distribution.distribution()
    is_known = distribution is None or type(distribution) is keras.distribution.DataParallel
    if not is_known or jax.process_count() > 1:
        raise ValueError(_distribution_message(model.name))


def _overwritten_message(model: str, variables: list[str]) -> str:
    return (
        "On JAX, gradients that overwrite their variables, such as those of float8 layers, cannot "
        f"be accumulated. Received: {model!r} with {variables}. Train in another precision, use "
        f"the TensorFlow backend (`KERAS_BACKEND=tensorflow`), or {WITHOUT}."
    )


def _distribution_message(model: str) -> str:
    return (
        "On JAX, gradients are accumulated on one device, or on those of one process with "
        f"`keras.distribution.DataParallel`. Received: {model!r} with another distribution, or "
        f"several processes. Set `DataParallel`, {_OTHERS} in their own ways, or {WITHOUT}."
    )


def unknown_variable_message(model: str) -> str:
    return (
        "On JAX, `on_update` can write to the variables of the model and its optimizer only. "
        f"Received: {model!r}, whose `on_update` writes to another variable. Store it in an "
        "attribute of the model, with `trainable=False`."
    )
