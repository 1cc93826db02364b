"""What several modules say where something cannot be done, or is done in another way.

Every message says what was expected, what was received, and the way out. What one module says
stands at its end, or in a module beside it.
"""

from __future__ import annotations

from typing import Any

ALONE = (
    "pass `fit` the full batch and set `microbatch_size` in place of `accumulation_steps` (with "
    '`loss_over="auto"`, the default), which is exact'
)
EXACT_WAY = f"{ALONE} for any loss, or override `microbatch_weight`"
WITHOUT = (
    "train without accumulation: "
    "`accumulation_steps=None`, `microbatch_size=None`, `skip_nonfinite=None`, "
    "and call `compile()` again"
)


def no_keras_model_message(name: str) -> str:
    return (
        "`AccumulatingModel` is a mixin for Keras model classes. "
        f"Received: class {name}, which is no subclass of `keras.Model`. "
        f"Write `class {name}(AccumulatingModel, keras.Model)`."
    )


def not_a_model_message(value: Any, function: str = "accumulate") -> str:
    hint = "Call the class first" if isinstance(value, type) else "Make a `keras.Model` of it first"
    return (
        f"`{function}` takes a Keras model. "
        f"Received: model={value!r} (of type {type(value).__name__}). {hint}."
    )


def lengths_message(gradients: str, variables: str) -> str:
    return (
        "There must be one gradient per variable, in two lists. "
        f"Received: {gradients} and {variables}. "
        "Pass the gradients of a loss with respect to `variables`, in the same order."
    )


def late_gradient_message(variables: list[Any]) -> str:
    names = [getattr(variable, "path", variable.name) for variable in variables]
    return (
        "A variable without a gradient in the first microbatch cannot get one later. "
        f"Received: a gradient for {names}. "
        "Let every microbatch use the same layers, or start with one that uses all of them."
    )


def batch_normalization_messages(pooled: list[str], others: list[str]) -> list[str]:
    """Return what there is to tell of BatchNormalization layers that have trained.

    Args:
        pooled: names of layers whose running averages move by the statistics of all samples.
        others: names of layers that move them themselves.
    """
    found = []
    if pooled:
        found.append(
            f"{_BEGIN} {pooled}. They normalize each microbatch by its own statistics (ghost batch "
            "normalization, https://arxiv.org/abs/1705.08741), so training differs from the full "
            "batch. Their running averages move once per update, by mean and variance of all its "
            f"samples. {_WAYS}"
        )
    if others:
        found.append(
            f"{_moving_message(others)}: their `call` is not Keras's own, or runs inside of a "
            f"branch, a loop or a function, or they were made by the first batch. {_WAYS}"
        )
    return found


def _moving_message(layers: list[str]) -> str:
    return (
        f"{_BEGIN} {layers}. They normalize each microbatch by its own statistics and move their "
        "running averages once per microbatch, so training differs from the full batch"
    )


_BEGIN = "BatchNormalization layers in training mode:"
_WAYS = (
    "Freeze them (`layer.trainable = False` before `compile`), "
    "use LayerNormalization or GroupNormalization, or accept the difference."
)


def not_an_optimizer_message(value: Any) -> str:
    hint = "Call the class first" if isinstance(value, type) else "Make one first"
    return (
        "`GradientAccumulator.apply` takes a Keras optimizer. "
        f"Received: optimizer={value!r} (of type {type(value).__name__}). "
        f"{hint}, such as `keras.optimizers.Adam()`."
    )


def weight_message(weight: Any) -> str:
    return (
        "`weight` must be a scalar number or tensor, or None where the loss is a sum. "
        f"Received: weight={weight!r}. "
        "Pass what the microbatch's loss averages over, such as the number of samples."
    )
