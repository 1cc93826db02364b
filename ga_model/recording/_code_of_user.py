"""Which layers, losses and metrics of a model compute with code that is not Keras's."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base._internals import layers_in
from ga_model.hearing._metrics_of_user import counts_samples, is_of_user
from ga_model.hearing._models import computes_loss_as_keras, is_of_keras
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
