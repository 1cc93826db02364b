"""Refuse what the JAX backend does not support: checks and messages."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import keras

from ga_model.base._internals import overwrites
from ga_model.core.messages import WITHOUT

_OTHERS = (
    "use the TensorFlow backend (`KERAS_BACKEND=tensorflow`) or PyTorch (`KERAS_BACKEND=torch`), "
    "which support it"
)


def check(model: keras.Model) -> None:
    """Raise ValueError if gradients overwrite variables, or the distribution is not supported."""
    if overwritten := [v.path for v in model.trainable_variables if overwrites(v)]:
        raise ValueError(
            "On JAX, gradients that overwrite their variables, such as those of float8 layers, "
            f"cannot be accumulated. Received: {model.name!r} with {overwritten}. Train in another "
            "precision, use the TensorFlow backend (`KERAS_BACKEND=tensorflow`), or "
            f"{WITHOUT}."
        )
    distribution = keras.distribution.distribution()
    is_known = distribution is None or type(distribution) is keras.distribution.DataParallel
    if not is_known or jax.process_count() > 1:
        raise ValueError(
            "On JAX, gradients are accumulated on one device, or on those of one process with "
            f"`keras.distribution.DataParallel`. Received: {model.name!r} with another "
            f"distribution, or several processes. Set `DataParallel`, {_OTHERS} in their own ways, "
            f"or {WITHOUT}."
        )


def check_known(
    model: keras.Model, scope: keras.StatelessScope, groups: Iterable[list[keras.Variable]]
) -> None:
    """Raise RuntimeError if a scope wrote to a variable that is in none of the groups."""
    if set(scope.state_mapping) - {id(variable) for group in groups for variable in group}:
        raise RuntimeError(
            "On JAX, `train_step` and `on_update` can write to the variables of the model and its "
            f"optimizer only. Received: {model.name!r}, where one of them writes to another "
            "variable. Store it in an attribute of the model, with `trainable=False`."
        )
