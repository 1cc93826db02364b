"""The Python state of a model and of what it was compiled with."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base._call_again import PythonState
from ga_model.base._identity import unique
from ga_model.hearing._metrics_of_user import parts_of
from ga_model.hearing._models import instances_in


def python_state(model: Any) -> PythonState:
    """Return the `PythonState` of a model, its layers, and metrics and losses of the user's."""
    return PythonState(model, compiled_of_user(model))


def compiled_of_user(model: Any) -> list[Any]:
    """Return the metrics and losses of a model whose classes are the user's."""
    losses = instances_in(getattr(model, "loss", None), keras.losses.Loss)
    parts = unique([*losses, *(part for metric in model.metrics for part in parts_of(metric))])
    return [part for part in parts if not is_of_library(part)]


def is_of_library(module: Any) -> bool:
    """Return whether the class of a module is not the user's."""
    return f"{type(module).__module__}.".startswith(("keras.", "torch.", "ga_model."))
