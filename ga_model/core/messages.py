"""Errors and warnings of the core, and those that it shares with backends.

Every message states what was expected, what was received, and the fix. Messages of a single module
are at its end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from ga_model.core.proof.verdict import Verdict

ALONE = (
    "pass `fit` the full batch and set `microbatch_size` instead of `accumulation_steps` (with "
    '`loss_over="auto"`, the default), which is exact'
)
WITHOUT = (
    "turn accumulation off: "
    "`accumulation_steps=None`, `microbatch_size=None`, `skip_nonfinite=None`, "
    "and call `compile()` again"
)


def own_loop_message(model: str) -> str:
    return (
        "Only `fit` and `train_on_batch` accumulate: a compiled function of your own cannot keep "
        f"the sums of a window. Received: a call of `train_step` of {model!r} by other code. Call "
        "`train_on_batch`, which updates once per window, sum the gradients in your own loop with "
        f"`GradientAccumulator`, or {WITHOUT}."
    )


def unlike_message(model: str, verdict: Verdict) -> str:
    written = [d.what for d in verdict.differences if d.what in verdict.written]
    way = f"; move what it writes to {written} into `on_update`" if written else ""
    fails, aim = "does not train as the full batch", "To train exactly"
    if all(difference.is_in_logs_only for difference in verdict.differences):
        fails, aim = "trains as the full batch, but logs other numbers", "For exact logs"
    return (
        f"A window of microbatches {fails}. Received: the training step of {model!r}, tried on "
        f"some samples of the first batch, at once and in parts: {_differing(verdict)}, however "
        f"the parts are weighted. {aim}, {ALONE}{way}; if the difference does not matter, override "
        "`microbatch_weight`."
    )


def whole_from_now_message(model: str, verdict: Verdict) -> str:
    return (
        "Updates so far may differ from those of the full batch. Received: the training step of "
        f"{model!r}, tried on some samples of a later batch, at once and in parts: "
        f"{_differing(verdict)}, and did not in the first batch. From now on each batch trains as "
        'a whole, which is exact. To train so from the beginning, set `loss_over="batch"`.'
    )


def _differing(verdict: Verdict) -> str:
    first, *others = verdict.differences
    size = ""
    if first.size < 10:
        size = f" by {first.size:.0%}" if first.size >= 0.01 else f" by {first.size:.0e}"
    more = f"; in all, {len(others) + 1} values differ" if others else ""
    return f"{first.what} differs{size}{more}"


def untried_message(model: str, error: Exception) -> str:
    return (
        "It is not known whether a window of microbatches trains as the full batch. Received: the "
        f"training step of {model!r}, which cannot be run on some samples of the first batch: "
        f"{text_of(error)}. Its loss is assumed to be a mean over samples. To train exactly, "
        f"{ALONE}, or override `microbatch_weight`."
    )


def unseen_message(model: str) -> str:
    return (
        "It is not known whether a window of microbatches trains as the full batch. Received: the "
        f"training step of {model!r}, whose gradients were all zero, or not finite, in the trial "
        "on samples of the first batches, and now are not. Its loss was assumed to be a mean over "
        f"samples. To train exactly, {ALONE}, or override `microbatch_weight`."
    )


def unlike_rows_message(model: str, shapes: list[tuple[int, ...]]) -> str:
    return (
        "It is not known whether a window of microbatches trains as the full batch. Received: the "
        f"training step of {model!r}, with tensors of shapes {shapes}. Tried on some rows of each, "
        "it failed or made other updates, which proves nothing if a batch cannot be cut into "
        "samples, such as the nodes and edges of a graph. The weight of a batch is the denominator "
        "of its losses; if that is right, return it in `microbatch_weight`. To train exactly in "
        'any case, pass `fit` the full batch and set `microbatch_size` with `loss_over="batch"` '
        "instead of `accumulation_steps`."
    )


def text_of(error: Exception) -> str:
    """Return the type and text of an error, without what Keras and TensorFlow add to its cause."""
    in_bold = re.search(r"\x1b\[1m(.*?)\x1b\[0m", str(error), re.DOTALL)
    cause = in_bold or re.search(r"([^\n]+)\n\t \[\[", str(error))  # from a graph node
    text = re.sub(r"^\{\{.*?\}\} ", "", cause[1] if cause else str(error))
    return f"{type(error).__name__}: {text}".rstrip(".")


def unverified_message(model: str) -> str:
    return (
        "With `verify=False` it is not known whether a window of microbatches trains as the full "
        f"batch. Received: {model!r}, with a custom step, loss, layer or metric, which is assumed "
        "to be a mean over samples. To try it on the first batch, leave `verify=True`."
    )


def late_message(model: str) -> str:
    return (
        "Updates so far may differ from those of the full batch. Received: the training step of "
        f"{model!r}, whose loss has another denominator than the first batches showed: until now "
        "both numbers were equal. From now on microbatches are weighted by the right one. To train "
        f"exactly from the beginning, {ALONE}, or override `microbatch_weight`."
    )


def unlike_shape_message(model: str) -> str:
    return (
        "The weight of a microbatch is a number that its step divides by. Received: the step of "
        f"{model!r}, which divides by other numbers than in the trial, so its loss is assumed to "
        f"be a mean over samples. To train exactly, {ALONE}, or override `microbatch_weight`."
    )


def unlike_entries_message(model: str) -> str:
    return (
        "The terms of this loss average over values whose numbers per sample changed within a "
        f"window, and not by one factor. Received: {model!r}. A microbatch has only one weight, so "
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
        "Float8 layers record the size of gradients, to scale later ones. "
        f"Received: {variables}, in a window that is partial, or whose microbatches have different "
        "weights: they recorded gradients of another scale than those of the full batch, and round "
        "later ones differently. Make the number of batches per epoch a multiple of "
        "`accumulation_steps`, and the batch size a multiple of `microbatch_size`."
    )


def unlike_updates_message(model: str) -> str:
    return (
        "A `train_step` must apply the same optimizers, in the same order and to the same "
        "variables, in all microbatches of a window. "
        f"Received: `train_step` of {model!r}, which applies others than in the microbatch before. "
        f"Let it apply all of them in each call, {ALONE} for any step, or {WITHOUT}."
    )


def noise_of_sum_message(model: str) -> str:
    return (
        "`GradientNoiseScale` needs a loss that is a mean over samples. "
        f"Received: {model!r}, whose loss is a sum. "
        'Set its reduction to "sum_over_batch_size" or "mean_with_sample_weight", '
        "or remove the callback."
    )


def applied_twice_message(model: str, optimizer: str) -> str:
    return (
        "A `train_step` that applies the same optimizer twice cannot be accumulated: "
        "the second gradient depends on the first update. "
        f"Received: `train_step` of {model!r}, which applies {optimizer!r} twice. "
        f"Sum the losses and apply once, use one optimizer per update, {ALONE} for any step, "
        f"or {WITHOUT}."
    )


def inner_graph_message(model: str) -> str:
    return (
        "Optimizers must be applied directly in `train_step` to be accumulated. "
        f"Received: `train_step` of {model!r}, which applies one inside `tf.cond`, a loop, or a "
        "nested `tf.function`. Move the call out (to skip NaN and Inf, set `skip_nonfinite=True`), "
        f"{ALONE} for any step, or {WITHOUT}."
    )


def not_recorded_message(model: str) -> str:
    return (
        "A `train_step` can be accumulated if its optimizers are attributes of the model, such as "
        "`self.optimizer`. "
        f"Received: `train_step` of {model!r}, which applies none. "
        "Store each optimizer in an attribute of the model and call "
        f"`self.<attribute>.apply(gradients, variables)`, {ALONE} with any optimizer, "
        f"or {WITHOUT}."
    )


def product_message(loss: str, model: str) -> str:
    return (
        "With sample weights, a loss must return one value per sample to be accumulated exactly. "
        f"Received: the loss {loss!r} of {model!r}, which returns a single number; Keras "
        "multiplies it by the mean of the sample weights. Training differs from the full batch: "
        f"return one value per sample, or {ALONE} for any loss, or override `microbatch_weight`."
    )


def written_message(model: str, variables: list[str]) -> str:
    return (
        f"`train_step` of {model!r}, or a layer that it calls, writes to {variables}: once per "
        "microbatch, and on the full batch once per update. Write to them in a method "
        f"`on_update(self)` of the model, which runs after each update, or {ALONE}."
    )


def changed_message(model: str, variables: list[str]) -> str:
    shown = [*variables[:3], *(f"{len(variables) - 3} more" for _ in variables[3:4])]
    return (
        f"Something other than its update changed variables of {model!r} within a window: {shown}. "
        "Its microbatches saw different weights, but the full batch sees one set. If another model "
        f"with the same layers trains in turn, train both in one `train_step`, or {ALONE}. If a "
        "callback changes them after each batch, change them in a method `on_update(self)` of the "
        "model, which runs after each update."
    )


def one_weight_message(exact: list[str], approximate: list[str]) -> str:
    return (
        "The terms of this loss average over different things, but a microbatch has only one "
        f"weight. Exact: {exact}. Exact only if each term has equal weights in all microbatches "
        f"and all windows are full: {approximate}. "
        "Give the terms the same reduction, mask and sample weights, or override "
        "`AccumulatingModel.microbatch_weight`."
    )


def unsplit_step_message(model: str) -> str:
    return (
        f"`train_step` of {model!r} calls no layer that can be split into microbatches, so it "
        "takes the memory of the full batch. Training is exact. To save the memory, keep networks "
        "in attributes of the model, and call them in `train_step` itself: not by "
        "`stateless_call`, nor in a nested `tf.function`."
    )


def whole_call_message(layer: str, reason: str) -> str:
    return (
        f"A call of {layer!r} cannot be split into microbatches and takes the memory of the full "
        f"batch (calls of layers inside it are split): {reason}. Training is exact. To save the "
        "memory, give every output one row per sample that depends on no other sample, draw random "
        "numbers with `keras.random` and a `keras.random.SeedGenerator`, or move the part that "
        "needs all samples out of the layer, into `train_step` or the loss."
    )


def late_gradient_message(variables: list[keras.Variable]) -> str:
    names = [path_of(variable) for variable in variables]
    return (
        "A variable that has no gradient in the first microbatch cannot get one later. "
        f"Received: a gradient for {names}. "
        "Use the same layers in every microbatch, or start with one that uses all of them."
    )


def zero_division_message(model: str) -> str:
    return (
        f"A loss of {model!r} was zero in a microbatch because its denominator was zero "
        "(`divide_no_nan`, or positive and negative weights that cancel), although its numerator "
        "was not. That microbatch has no weight, and is missing from the update of the full batch. "
        "Use only positive weights, shuffle the samples, or pass `fit` the full batch and set a "
        '`microbatch_size` with `loss_over="batch"`, which is exact.'
    )


def batch_normalization_messages(pooled: list[str], others: list[str]) -> list[str]:
    """Return the warnings about BatchNormalization layers in training mode.

    Args:
        pooled: names of layers whose running averages are updated from all samples.
        others: names of layers that update them themselves.
    """
    texts = {
        "(ghost batch normalization, https://arxiv.org/abs/1705.08741), so training differs from "
        "the full batch. Their running averages are updated once per update, with the mean and "
        "variance of all its samples.": pooled,
        "and update their running averages once per microbatch, so training differs from the full "
        "batch: their `call` is overridden, or runs inside a branch, a loop or a nested "
        "function.": others,
    }
    return [
        f"BatchNormalization layers in training mode: {layers}. They normalize each microbatch by "
        f"its own statistics {text} Freeze them (`layer.trainable = False` before `compile`), use "
        "LayerNormalization or GroupNormalization, or accept the difference."
        for text, layers in texts.items()
        if layers
    ]


def weight_message(weight: Any) -> str:
    return (
        "`weight` must be a scalar number or tensor, or None if the loss is a sum. "
        f"Received: weight={weight!r}. "
        "Pass the denominator of the microbatch's loss, such as the number of samples."
    )


def mixed_weights_message() -> str:
    return (
        "`weight` must be a number in every call of a window, or None in every one. "
        "Received: both. Pass a number in all of them, or None in all of them."
    )


def path_of(variable: keras.Variable) -> str:
    """Return the path of a Keras variable, or the name of a TensorFlow variable."""
    return str(getattr(variable, "path", None) or variable.name)
