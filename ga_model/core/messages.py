"""Texts of errors and warnings of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ga_model.base._messages import ALONE, WITHOUT

if TYPE_CHECKING:
    from ga_model.core.proof.verdict import Verdict


def own_loop_message(model: str) -> str:
    return (
        "A window's sums are between the steps that `fit` and `train_on_batch` run, and not in "
        f"what `train_step` returns in a compiled function. Received: a call of `train_step` of "
        f"{model!r} by other code. Call `train_on_batch`, which updates once per window, sum the "
        f"gradients in your own loop with `GradientAccumulator`, or {WITHOUT}."
    )


def unlike_message(model: str, verdict: Verdict) -> str:
    first, *others = verdict.differences
    more = f", and {len(others)} more things do" if others else ""
    size = ""
    if first.size < 10:
        size = f" by {first.size:.0%}" if first.size >= 0.01 else f" by {first.size:.0e}"
    written = [d.what for d in verdict.differences if d.what in verdict.written]
    way = f"; move what it writes to {written} into `on_update`" if written else ""
    return (
        "A window of microbatches does not train as the full batch. Received: the training step of "
        f"{model!r}, which was run on some samples of the first batch at once, and in parts: "
        f"{first.what} differs{size}{more}, however the parts are weighted. To train "
        f"exactly, {ALONE}{way}; if the difference does not matter, override `microbatch_weight`."
    )


def untried_message(model: str, error: Exception) -> str:
    return (
        "It is not known whether a window of microbatches trains as the full batch. Received: the "
        f"training step of {model!r}, which cannot be run on some samples of the first batch: "
        f"{type(error).__name__}: {error} It is taken for a mean over samples. To train exactly, "
        f"{ALONE}, or override `microbatch_weight`."
    )


def unverified_message(model: str) -> str:
    return (
        "With `verify=False` it is not known whether a window of microbatches trains as the full "
        f"batch. Received: {model!r}, with a step, loss, layer or metric of its own, which is "
        "taken for a mean over samples. To have it tried on the first batch, leave `verify=True`."
    )


def late_message(model: str) -> str:
    return (
        "Updates so far may differ from those of the full batch. Received: the training step of "
        f"{model!r}, which weighs microbatches by a number that was the same until now as that of "
        "their samples, or another one that it was taken for. From now on it is the right one. To "
        f"train exactly, {ALONE}, or override `microbatch_weight`."
    )


def unlike_shape_message(model: str, rows: int) -> str:
    return (
        "What a microbatch weighs is a number that its step divides by. Received: the step of "
        f"{model!r}, which divides in another way with {rows} samples, so it is taken for a mean "
        f"over samples. To train exactly, {ALONE}, or override `microbatch_weight`."
    )


def unlike_entries_message(model: str) -> str:
    return (
        "The terms of this loss average over values whose numbers per sample changed within a "
        f"window, each in its own way. Received: {model!r}. A microbatch has only one weight, so "
        f"training differs from the full batch: pad to one length, or {ALONE}."
    )


def sum_with_regularizers_message(model: str) -> str:
    return (
        "With several processes, a loss that is a sum cannot be combined with weight regularizers: "
        "each process would add them. "
        f"Received: {model!r} with both. Use a loss that is a mean, or `weight_decay`."
    )


def own_averages_message(layers: list[str]) -> str:
    return (
        "Processes that train together share gradients, but not the running averages of layers. "
        f"Received: BatchNormalization layers {layers}, whose running averages cover only the "
        "process's own samples. Use those of one process for all, freeze them "
        "(`layer.trainable = False` before `compile`), or use LayerNormalization or "
        "GroupNormalization."
    )


def rescaled_message(variables: list[str]) -> str:
    return (
        "Float8 layers remember how large gradients are, to scale the next ones. "
        f"Received: {variables}, in a window that is partial, or whose microbatches have different "
        "weights: there they saw gradients of another scale than on the full batch, and round the "
        "next ones differently. Let the batches of an epoch be a multiple of `accumulation_steps`, "
        "and the samples of a batch one of `microbatch_size`."
    )


def unlike_updates_message(model: str) -> str:
    return (
        "A `train_step` must apply the same optimizers, in the same order and to the same "
        "variables, in all microbatches of a window. "
        f"Received: `train_step` of {model!r}, which applies others than in the microbatch before. "
        f"Let it apply all of them in each call, {ALONE} for any step, or {WITHOUT}."
    )
