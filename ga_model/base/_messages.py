"""Errors and warnings that several modules share.

Every message states what was expected, what was received, and the fix. The messages of a single
module are at its end, or in a module beside it.
"""

from __future__ import annotations

from typing import Any

ALONE = (
    "pass `fit` the full batch and set `microbatch_size` instead of `accumulation_steps` (with "
    '`loss_over="auto"`, the default), which is exact'
)
EXACT_WAY = f"{ALONE} for any loss, or override `microbatch_weight`"
WITHOUT = (
    "turn accumulation off: "
    "`accumulation_steps=None`, `microbatch_size=None`, `skip_nonfinite=None`, "
    "and call `compile()` again"
)


def no_keras_model_message(name: str) -> str:
    return (
        "`AccumulatingModel` is a mixin for Keras model classes. "
        f"Received: class {name}, which is not a subclass of `keras.Model`. "
        f"Write `class {name}(AccumulatingModel, keras.Model)`."
    )


def not_a_model_message(value: Any, function: str = "accumulate") -> str:
    hint = (
        "Call the class first" if isinstance(value, type) else "Turn it into a `keras.Model` first"
    )
    return (
        f"`{function}` takes a Keras model. "
        f"Received: model={value!r} (of type {type(value).__name__}). {hint}."
    )


def lengths_message(gradients: str, variables: str) -> str:
    return (
        "`add` takes two lists of equal length: one gradient for each variable. "
        f"Received: {gradients} and {variables}. "
        "Pass the gradients of a loss with respect to `variables`, in the same order."
    )


def late_gradient_message(variables: list[Any]) -> str:
    names = [getattr(variable, "path", variable.name) for variable in variables]
    return (
        "A variable that has no gradient in the first microbatch cannot get one later. "
        f"Received: a gradient for {names}. "
        "Use the same layers in every microbatch, or start with one that uses all of them."
    )


def lost_term_message(model: str) -> str:
    return (
        f"A loss of {model!r} was zero in a microbatch because it was divided by zero "
        "(`divide_no_nan`, or a sum of weights of both signs), although what was divided was not. "
        "That microbatch has no weight, and is missing from the update of the full batch. Divide "
        "by `maximum(number, 1)`, which is exact, use only positive weights, or set a "
        '`microbatch_size` with `loss_over="batch"`.'
    )


def batch_normalization_messages(pooled: list[str], others: list[str]) -> list[str]:
    """Return the warnings about BatchNormalization layers in training mode.

    Args:
        pooled: names of layers whose running averages are updated from all samples.
        others: names of layers that update them themselves.
    """
    found = []
    if pooled:
        found.append(
            f"{_BEGIN} {pooled}. They normalize each microbatch by its own statistics (ghost batch "
            "normalization, https://arxiv.org/abs/1705.08741), so training differs from the full "
            "batch. Their running averages are updated once per update, with the mean and variance "
            f"of all its samples. {_WAYS}"
        )
    if others:
        found.append(
            f"{_moving_message(others)}: their `call` is overridden, or runs inside a branch, a "
            f"loop or a nested function, or the first batch created them. {_WAYS}"
        )
    return found


def _moving_message(layers: list[str]) -> str:
    return (
        f"{_BEGIN} {layers}. They normalize each microbatch by its own statistics and update "
        "their running averages once per microbatch, so training differs from the full batch"
    )


_BEGIN = "BatchNormalization layers in training mode:"
_WAYS = (
    "Freeze them (`layer.trainable = False` before `compile`), "
    "use LayerNormalization or GroupNormalization, or accept the difference."
)


def not_an_optimizer_message(value: Any) -> str:
    hint = "Call the class first" if isinstance(value, type) else "Create one"
    return (
        "`GradientAccumulator.apply` takes a Keras optimizer. "
        f"Received: optimizer={value!r} (of type {type(value).__name__}). "
        f"{hint}: `keras.optimizers.Adam()`, for example."
    )


def weight_message(weight: Any) -> str:
    return (
        "`weight` must be a scalar number or tensor, or None if the loss is a sum. "
        f"Received: weight={weight!r}. "
        "Pass what the microbatch's loss averages over, such as the number of samples."
    )


def mixed_weights_message() -> str:
    return (
        "`weight` must be a number in every call of a window, or None in every one. "
        "Received: both. Pass a number in all of them, or None in all of them."
    )


def path_of(variable: Any) -> str:
    """Return what messages call a variable of Keras, or of TensorFlow, which has a name alone."""
    return str(getattr(variable, "path", None) or variable.name)


def gradient_message(gradient: Any, variable: Any, source: str) -> str:
    return (
        "A gradient must be a tensor, an array of real numbers or None. "
        f"Received: a {type(gradient).__name__} for {path_of(variable)!r}. Pass {source}, or its "
        "values as a NumPy array."
    )
