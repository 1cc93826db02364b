"""The Python state of a model and of what it was compiled with."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base._call_again import PythonState, leaves_in
from ga_model.base._identity import unique
from ga_model.base._internals import layers_in
from ga_model.recording._metrics_of_user import parts_of
from ga_model.recording._models import instances_in


def python_state(model: Any) -> PythonState:
    """Return the `PythonState` of a model and its layers, and of objects of the user's in them."""
    return PythonState(model, others_of_user(model), has_arrays=True)


def others_of_user(model: Any) -> list[Any]:
    """Return the objects of the user's that a model keeps, and that are no layers of it.

    They are its metrics and losses, and what attributes of it, of its layers and of one another
    have of classes from the same packages.
    """
    losses = instances_in(getattr(model, "loss", None), keras.losses.Loss)
    compiled = [*losses, *(part for metric in model.metrics for part in parts_of(metric))]
    layers, found = layers_in(model), [p for p in unique(compiled) if not is_of_library(p)]
    known = {id(part) for part in (*layers, *found)}
    packages = {_package(part) for part in (*layers, *found) if not is_of_library(part)}
    waiting = [*layers, *found] if packages else []
    while waiting:
        for value in leaves_in(vars(waiting.pop()).values()):
            is_new = id(value) not in known and not isinstance(value, type)
            if is_new and hasattr(value, "__dict__") and _package(value) in packages:
                known.add(id(value))
                found.append(value)
                waiting.append(value)
    return found


def _package(part: Any) -> str:
    return type(part).__module__.split(".")[0]


def is_of_library(module: Any) -> bool:
    """Return whether the class of a module is not the user's."""
    return f"{type(module).__module__}.".startswith(("keras.", "torch.", "ga_model."))
