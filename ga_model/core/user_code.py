"""Tell custom losses, metrics and other objects from those of Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from ga_model.base._identity import unique
from ga_model.base._internals import arguments_of_loss, compiled_loss, is_along_samples, layers_in
from ga_model.base._python_state import PythonState, leaves_in
from ga_model.base._types import Tensor
from ga_model.core.models import instances_in

_COMPARING = {"dice", "tversky", "circle"}  # losses that return one number for all samples


def _name_of(function: Any) -> str | None:
    """Return the name of a loss function of Keras, or None for another one of the same name."""
    name = getattr(function, "__name__", "")
    return name if getattr(keras.losses, name, None) is function else None


def has_loss_of_user(model: keras.Model) -> bool:
    """Return whether a compiled loss is custom, or does not treat each sample separately."""
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    return not all(is_by_sample(keras.losses.get(loss)) for loss in losses)


def is_by_sample(loss: keras.losses.Loss | Callable[..., Tensor]) -> bool:
    """Return whether a loss is one of Keras that treats each sample separately."""
    is_loss = isinstance(loss, keras.losses.Loss)
    function = getattr(loss, "fn", None) if is_loss else loss
    name = type(loss).__name__ if function is None else _name_of(function)
    is_of_keras = not is_loss or type(loss).__module__.startswith("keras.")
    is_over_samples = arguments_of_loss(loss).get("axis", -1) not in (None, -1)
    return is_of_keras and name not in (None, *_COMPARING) and not is_over_samples


def parts_of(metric: keras.Metric) -> list[keras.Metric]:
    """Return a metric of `model.metrics` and the metrics that it contains, in this order."""
    if type(metric).__name__ == "CompileMetrics":
        return [part for inner in metric.metrics for part in parts_of(inner)]
    inner_metrics = instances_in(vars(metric), keras.metrics.Metric)
    return unique([metric, *(part for inner in inner_metrics for part in parts_of(inner))])


def module_of(value: Any) -> str:
    """Return the name of the module that defines a value, or its class."""
    return getattr(value, "__module__", None) or type(value).__module__


def is_of_user(value: Any) -> bool:
    """Return whether a value is a callable that is not from Keras."""
    return callable(value) and not module_of(value).startswith("keras.")


def counts_samples(metric: keras.Metric) -> bool:
    """Return whether a metric is a Keras metric that adds up values of single samples."""
    parts = [metric, *parts_of(metric)]
    if any(map(is_along_samples, parts)):
        return False
    values = [value for part in parts for value in vars(part).values()]
    # Losses reduce their values to one number.
    has_other_code = any(
        is_of_user(value) or isinstance(value, keras.losses.Loss) or _name_of(value) in _COMPARING
        for value in values
    )
    return all(type(part).__module__.startswith("keras.") for part in parts) and not has_other_code


def others_of_user(model: keras.Model) -> list[Any]:
    """Return the custom objects of a model that are not layers.

    These are its metrics and losses, and all objects of classes from the same packages that are
    reachable by attributes of the model, its layers and one another.
    """
    of_all = compiled_loss(model)  # has instances of losses that `compile` got as classes
    losses = [] if of_all is None else instances_in(vars(of_all), keras.losses.Loss)
    compiled = [*losses, *(part for metric in model.metrics for part in parts_of(metric))]
    layers, objects = layers_in(model), [p for p in unique(compiled) if not is_of_library(p)]
    seen = {id(part) for part in (*layers, *objects)}
    packages = {_package(part) for part in (*layers, *objects) if not is_of_library(part)}
    queue = [*layers, *objects] if packages else []
    while queue:
        for value in leaves_in(vars(queue.pop()).values()):
            is_new = id(value) not in seen and not isinstance(value, type)
            if is_new and hasattr(value, "__dict__") and _package(value) in packages:
                seen.add(id(value))
                objects.append(value)
                queue.append(value)
    return objects


def python_state_of(model: keras.Model) -> PythonState:
    """Return a snapshot of what a model's code may write to, apart from variables and tensors."""
    of_all = compiled_loss(model)  # may make its losses in the first step
    return PythonState(model, [*others_of_user(model), *([] if of_all is None else [of_all])])


def _package(part: Any) -> str:
    return type(part).__module__.split(".")[0]


def is_of_library(module: Any) -> bool:
    """Return whether the class of a module is from Keras, PyTorch or this package."""
    return f"{type(module).__module__}.".startswith(("keras.", "torch.", "ga_model."))
