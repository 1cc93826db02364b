"""Which losses are Keras's own and have a value of its own for each sample."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base._internals import arguments_of_loss

_COMPARING = {"dice", "tversky", "circle"}


def _name_of(function: Any) -> str | None:
    """Return the name of one of Keras's loss functions, or None: others may bear it, too."""
    name = getattr(function, "__name__", "")
    return name if getattr(keras.losses, name, None) is function else None


def compares_samples(function: Any) -> bool:
    """Return whether a function is one of Keras's losses that give one number for all samples."""
    return _name_of(function) in _COMPARING


def is_by_sample(loss: Any) -> bool:
    """Return whether a loss is one of Keras's that treat samples one by one."""
    found, function = type(loss), getattr(loss, "fn", None)
    name = found.__name__ if function is None else _name_of(function)
    is_of_keras = found.__module__.startswith("keras.") and name is not None
    is_over_samples = arguments_of_loss(loss).get("axis", -1) not in (None, -1)
    return is_of_keras and name not in _COMPARING and not is_over_samples
