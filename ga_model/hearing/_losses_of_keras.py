"""Which losses are Keras's own and have a value of its own for each sample."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base._internals import arguments_of_loss

_COMPARING = {"dice", "tversky", "circle"}


def is_by_sample(loss: Any) -> bool:
    """Return whether a loss is one of Keras's that treat samples one by one."""
    found, name = type(loss), type(loss).__name__
    if (function := getattr(loss, "fn", None)) is not None:  # which may bear the name of another
        name = getattr(function, "__name__", "")
        if getattr(keras.losses, name, None) is not function:
            return False
    is_of_keras = found.__module__.startswith("keras.")
    is_over_samples = arguments_of_loss(loss).get("axis", -1) not in (None, -1)
    return is_of_keras and name not in _COMPARING and not is_over_samples
