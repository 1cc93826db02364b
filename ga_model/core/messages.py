"""Texts of errors and warnings of the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ga_model.base._messages import ALONE, WITHOUT

if TYPE_CHECKING:
    from ga_model.core.proof.verdict import Verdict

_OTHERS = (
    "use the TensorFlow backend (`KERAS_BACKEND=tensorflow`) or PyTorch (`KERAS_BACKEND=torch`), "
    "which support it"
)


def own_loop_message(model: str) -> str:
    return (
        "On JAX, a window's sums are between the steps that `fit` and `train_on_batch` run, and "
        f"not in what `train_step` returns. Received: a call of `train_step` of {model!r} by other "
        "code. Call `train_on_batch`, which updates once per window, sum the gradients in your own "
        f"loop, or {WITHOUT}."
    )


def unlike_message(model: str, verdict: Verdict) -> str:
    first, *others = verdict.differences
    more = f", and {len(others)} more things do" if others else ""
    size = f" by {first.size:.0%}" if first.size < 10 else ""
    return (
        "A window of microbatches does not train as the full batch. Received: the `train_step` of "
        f"{model!r}, which was run on some samples of the first batch at once, and in parts: "
        f"{first.what} differs{size}{more}, however the parts are weighted. To train "
        f"exactly, {ALONE}; if the difference does not matter, override `microbatch_weight`."
    )


def untried_message(model: str, error: Exception) -> str:
    return (
        "It is not known whether a window of microbatches trains as the full batch. Received: the "
        f"`train_step` of {model!r}, which cannot be run on some samples of the first batch: "
        f"{type(error).__name__}: {error} It is taken for a mean over samples. To train exactly, "
        f"{ALONE}, or override `microbatch_weight`."
    )


def mixing_message(model: str, layer: str, why: str) -> str:
    return (
        "Gradients of microbatches add up to the full-batch gradient only if the model treats "
        f"samples independently. Received: {model!r}, of which that is not known: {layer!r} {why}. "
        "If it compares samples, training differs from the full batch. To train exactly, "
        f"{ALONE}; if samples are independent, override `microbatch_weight`."
    )


def not_additive_message(subject: str, why: str) -> str:
    return (
        "Gradients of microbatches add up to the full-batch gradient only if the loss is a mean or "
        f"a sum over samples. Received: {subject}, of which that is not known: it {why}. "
        "If it compares samples, training differs from the full batch. To train exactly, "
        f"{ALONE}; or override `microbatch_weight`."
    )


def own_call_message(subject: str) -> str:
    return (
        "What a loss averages over is known from its `call`. "
        f"Received: {subject}, whose `__call__` is custom. It is taken for a mean over samples; if "
        "it is none, training differs from the full batch. Compute one value per sample in `call`, "
        f"override `microbatch_weight`, or {ALONE}."
    )


def addition_message(model: str) -> str:
    return (
        "A loss added with `add_loss` must be a mean or a sum over samples. "
        f"Received: {model!r} with one of which that is not known; it is taken for a mean. If it "
        f"is none, training differs from the full batch. To train exactly, {ALONE}, or override "
        "`microbatch_weight`."
    )


def metric_message(metric: str, model: str, why: str) -> str:
    return (
        "A metric adds up over microbatches if it is a mean or a sum over samples. "
        f"Received: the metric {metric!r} of {model!r}, of which that is not known: its update "
        f"{why}. If it is none, its logs differ from those of the full batch; updates do not. "
        f"For exact logs, {ALONE}."
    )


def unlike_entries_message(model: str) -> str:
    return (
        "The terms of this loss average over values whose numbers per sample changed within a "
        f"window, each in its own way. Received: {model!r}. A microbatch has only one weight, so "
        f"training differs from the full batch: pad to one length, or {ALONE}."
    )
