"""What a window's sum tells."""

from __future__ import annotations

from typing import Any


def summed_rows_message(variables: list[str], optimizer: str) -> str:
    return (
        f"A window looked up more rows of {variables} than 1.25 times the size of the table. To "
        "limit memory, rows with equal ids were summed before the update. On the full batch, "
        f"{optimizer!r} gets each lookup as a separate row, so its update differs. Use fewer "
        "`accumulation_steps`, or `microbatch_size`, which does not sum rows."
    )


def rescaled_message(variables: list[str]) -> str:
    return (
        "Float8 layers remember how large gradients are, to scale the next ones. "
        f"Received: {variables}, in a window that is partial, or whose microbatches have different "
        "weights: there they saw gradients of another scale than on the full batch, and round the "
        "next ones differently. Let the batches of an epoch be a multiple of `accumulation_steps`, "
        "or use `microbatch_size`."
    )


def gradient_message(gradient: Any, variable: Any) -> str:
    return (
        "A gradient must have the shape of its variable. "
        f"Received: shapes {tuple(gradient.shape)} and {tuple(variable.shape)}. "
        "Pass what `tape.gradient(loss, variables)` returns, with the same `variables`."
    )


def unknown_variables_message() -> str:
    return (
        "All gradients of a window must belong to the same variables, in the same order. "
        "Received: different variables than in the first microbatch. "
        "After freezing or unfreezing layers, call `model.compile()` again; "
        "in your own loop, create a new `GradientAccumulator`."
    )


def mixed_weights_message() -> str:
    return (
        "`weight` must be a number in every microbatch of a `GradientAccumulator`, or None in "
        "every one. Received: both. Pass None only if the loss is a sum."
    )


def accumulator_scope_message() -> str:
    return (
        "A `GradientAccumulator` must be used under the `tf.distribute` strategy it was created "
        "in. Received: a call from elsewhere. Create it inside `with strategy.scope():`, like the "
        "model and the optimizer, and call it in the function that `strategy.run` runs."
    )
