"""What is said of a step whose microbatches differ."""

from __future__ import annotations

from ga_model.base._messages import ALONE


def changing_targets_message(model: str) -> str:
    return (
        "All microbatches of a batch must apply the same optimizers, in the same order. "
        f"Received: `train_step` of {model!r}, which changes them between microbatches. "
        "Apply every optimizer in every step, or set `microbatch_size=None`."
    )


def changing_calls_message(model: str) -> str:
    return (
        "All microbatches of a batch must call the same BatchNormalization layers in training "
        f"mode. Received: {model!r}, which changes them between microbatches. Call every layer in "
        "every step, or set `microbatch_size=None`."
    )


def unread_step_message(model: str, error: Exception) -> str:
    return (
        "Whether losses, metrics and custom gradients (`tf.custom_gradient`) add up over "
        f"microbatches is read from the graph of a step. Received: {model!r} with "
        f"`run_eagerly=True`, whose step cannot run in a graph ({type(error).__name__}). If it has "
        "losses or metrics that are no mean over samples, or custom gradients that clip or mix "
        f"samples, {ALONE}."
    )
