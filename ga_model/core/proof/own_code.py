"""Detect user code in a model, which a trial must check."""

from __future__ import annotations

import keras

from ga_model.base._internals import layer_state, layers_in, loss_tracker, operations_in, overwrites
from ga_model.core.backend import Backend
from ga_model.core.proof.calls import combines_samples
from ga_model.core.statistics import is_known
from ga_model.core.user_code import counts_samples, is_of_user, module_of

_OF_WEIGHTS = ("initializer", "regularizer", "constraint")  # ends of attribute names
_BACKENDS = ("tensorflow", "torch", "jax")


def has_code_of_user(model: keras.Model, backend: Backend) -> bool:
    """Return whether layers or metrics of a model are the user's own, or may combine samples."""
    layers = layers_in(model)
    if _is_run_by_user(layers, backend):
        return True
    if any(combines_samples(*part) for layer in layers for part in operations_in(layer)):
        return True
    tracker = loss_tracker(model)
    return not all(counts_samples(metric) for metric in model.metrics if metric is not tracker)


def may_run_user_code(layer: keras.Layer, backend: Backend) -> bool:
    """Return whether a call of a layer may run more than Keras's own layers."""
    parts = layers_in(layer)
    return _is_run_by_user(parts, backend) or any(map(operations_in, parts))


def has_own_gradients(layer: keras.Layer, backend: Backend) -> bool:
    """Return whether a call of a layer may have custom gradients."""
    parts = layers_in(layer)
    operations = [operation for part in parts for operation, *_ in operations_in(part)]
    return (
        _is_run_by_user(parts, backend)
        or any(map(overwrites, layer.variables))
        or not all(type(operation).__module__.startswith("keras.") for operation in operations)
    )


def _is_run_by_user(layers: list[keras.Layer], backend: Backend) -> bool:
    """Return whether calls of these layers run user code."""
    return backend.has_hooks() or any(map(_is_of_user, layers))


def _is_of_user(layer: keras.Layer) -> bool:
    module = type(layer).__module__
    holds_code = isinstance(layer, (keras.layers.Lambda, keras.layers.TorchModuleWrapper))
    is_of_keras = not (is_of_user(type(layer)) or is_of_user(type(layer).call) or holds_code)
    axes = getattr(layer, "axis", getattr(layer, "axes", None))
    axes = axes if isinstance(axes, (list, tuple)) else [axes]
    is_along_samples = any(axis is not None and (axis == 0 or axis < -1) for axis in axes)
    has_state = bool(layer_state(layer)) and not is_known(layer)
    is_stateful = getattr(layer, "stateful", False) or has_state
    is_known_layer = is_of_keras and ".preprocessing." not in module
    return not is_known_layer or is_along_samples or is_stateful or _has_function_of_user(layer)


def _has_function_of_user(layer: keras.Layer) -> bool:
    """Return whether a Keras layer calls other code, such as the user's own activation.

    Initializers, regularizers and constraints see no samples. Backend functions are tried alone.
    """
    for name, value in vars(layer).items():
        if not callable(value) or name.endswith(_OF_WEIGHTS):
            continue
        if isinstance(layer, keras.Model) and name != "call":  # for training
            continue
        # A method is of its object's class, and of the module that defines its function.
        parts = getattr(value, "__self__", value), getattr(value, "__func__", value)
        modules = list(map(module_of, parts))
        is_class_or_layer = isinstance(value, (type, keras.layers.Layer))
        if is_class_or_layer or all(module.startswith("keras.") for module in modules):
            continue
        is_of_backend = modules[0].split(".")[0] in _BACKENDS
        if not is_of_backend or combines_samples(value, (keras.KerasTensor((None, 4)),), {}):
            return True
    return False
