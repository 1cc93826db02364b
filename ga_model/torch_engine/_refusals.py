"""What is not supported on the PyTorch backend: checks, errors and warnings."""

from __future__ import annotations

from typing import Any

import torch

from ga_model.backends.torch import refusals
from ga_model.base._messages import ALONE
from ga_model.hearing._models import instances_in

_TO_BE_EXACT = (
    "Training differs from the full batch. To train exactly, pass `fit` the full batch and set "
    '`microbatch_size` with `loss_over="batch"` instead of `accumulation_steps`'
)


def check_trial(model: Any) -> None:
    """Raise ValueError if a step cannot be tried without its updates."""
    if instances_in(list(vars(model).values()), torch.optim.Optimizer):
        raise ValueError(refusals.unknown_update_message(model.name))


def unknown_loss_message(model: str) -> str:
    return (
        "On PyTorch, what a custom `train_step` or `compute_loss` averages over is found by trial: "
        "the gradients of a microbatch are compared with those of its halves. Received: "
        f"{model!r}, whose gradients are neither those of a mean nor of a sum over samples, or "
        "change between trials because the step draws random numbers. Override "
        '`microbatch_weight`: return the number of samples if the loss is their mean, or "sum". Or '
        f"{ALONE}."
    )


def worked_over_message(model: str) -> str:
    return (
        "Gradients must reach the optimizer unchanged, because a window sums them first. Received: "
        f"`train_step` of {model!r}, which changes the gradients that PyTorch computed, by "
        "clipping for example: in a window this happens once per microbatch, on the full batch "
        "once per update. Let the optimizer do it (`global_clipnorm`, `clipnorm`, `clipvalue`, "
        f"`weight_decay`), or {ALONE}."
    )


def first_of(names: list[str]) -> list[str]:
    """Return the names that a message has room for."""
    return names if len(names) < 4 else [*names[:3], "..."]


def weights_written_message(model: str, weights: list[str]) -> str:
    return (
        "In a window, weights change once, when the optimizers are applied at its end. Received: "
        f"`train_step` of {model!r}, or a layer that it calls, which writes to {weights} itself, "
        "by clipping or updating them by hand for example: in a window this happens once per "
        "microbatch, before the update. Clip weights by a constraint (`kernel_constraint`, "
        "`bias_constraint`), which the optimizer applies after each update, write to them in "
        f"`on_update(self)`, update them with an optimizer of `keras.optimizers`, or {ALONE}."
    )


def no_update_message(model: str) -> str:
    return (
        "Each batch of a window adds its gradients to those of the optimizers that `train_step` "
        f"applies. Received: `train_step` of {model!r}, which applies none in this batch. Apply "
        "one in each batch: a step that updates only once in several batches does by itself what "
        f"`accumulation_steps` is for. Or {ALONE}, for any step."
    )


def left_gradients_message(model: str) -> str:
    return (
        "With accumulation, each batch begins without gradients. Received: `train_step` of "
        f"{model!r}, which adds the gradients of each batch to those of the batch before: it takes "
        "them with `backward()`, and never clears them. So training differs from that without "
        "accumulation: call `self.zero_grad()` before `backward()` in each step."
    )


def several_optimizers_message(model: str) -> str:
    return (
        "A window applies all optimizers of a `train_step` at its end, one after the other. "
        f"Received: `train_step` of {model!r}, which applies several. If it computes with what the "
        "first has updated before it applies the next, training differs from the full batch: take "
        f"all gradients before the first update, or {ALONE}."
    )


def not_additive_message(subject: str) -> str:
    return (
        "Gradients of microbatches add up to the full-batch gradient only if the loss is a sum "
        f"over samples, or such a sum divided by their number. Received: {subject}, whose "
        "gradients of a microbatch are not those of its halves together: it compares samples, "
        f"divides by something other than their number, or draws random numbers. {_TO_BE_EXACT}, "
        "or override `microbatch_weight` if the loss is a sum divided by something else."
    )


def mixing_message(model: str) -> str:
    return (
        "Gradients of microbatches add up to the full-batch gradient only if the model treats "
        f"samples independently. Received: {model!r}, whose outputs for one sample depend on the "
        f"others of its microbatch. {_TO_BE_EXACT}."
    )


def unreadable_addition_message(model: str) -> str:
    return (
        "A loss added with `add_loss` must be a mean or a sum over samples. "
        f"Received: {model!r} with one that is neither. {_TO_BE_EXACT}."
    )
