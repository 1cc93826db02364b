"""Which layers, losses and metrics of a model compute with code that is not Keras's."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base._internals import layers_in
from ga_model.hearing._models import computes_loss_as_keras, is_of_keras
from ga_model.hearing._stand_in import original_of
from ga_model.reading._loss_reading import is_known


def has_code_of_user(model: Any) -> bool:
    """Return whether a step of a model may run code that is not Keras's, up to the optimizer."""
    layers = layers_in(model, include_self=False)
    return not (
        computes_loss_as_keras(model)
        and is_of_keras(model, "call")
        and all(map(_is_of_keras, layers))
        and all(map(is_known, keras.tree.flatten(model.loss)))
        and all(map(counts_samples, model.metrics))
    )


def is_layer_of_keras(layer: Any) -> bool:
    """Return whether all that a layer computes is code of Keras's."""
    # A model may hold more than layers.
    return not isinstance(layer, keras.Model) and all(map(_is_of_keras, layers_in(layer)))


def _is_of_keras(layer: Any) -> bool:
    """Return whether a layer is Keras's own, but for those that are in it."""
    is_known = type(layer).__module__.startswith("keras.")
    has_function = any(is_of_user(value) for value in vars(layer).values())
    return is_known and not has_function and not isinstance(layer, keras.layers.Lambda)


def parts_of(metric: Any) -> list[Any]:
    """Return the metrics that one of a model's `metrics` consists of."""
    metric = original_of(metric)
    is_compiled = type(metric).__name__ == "CompileMetrics"
    return list(metric.metrics) if is_compiled else [metric]


def is_of_user(value: Any) -> bool:
    """Return whether a value is a function, or is called like one, that is not Keras's."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return callable(value) and not module.startswith("keras.")


def counts_samples(metric: Any) -> bool:
    """Return whether a metric is one of Keras's own that counts what it gets of each sample."""
    parts = [original_of(metric), *parts_of(metric)]
    held = [value for part in parts for value in vars(part).values()]
    # Losses reduce what they compute to one number.
    is_of_others = any(is_of_user(value) or isinstance(value, keras.losses.Loss) for value in held)
    return all(type(part).__module__.startswith("keras.") for part in parts) and not is_of_others
