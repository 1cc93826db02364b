"""Errors and warnings about steps that cannot be accumulated, or that train differently then."""

from __future__ import annotations

from collections.abc import Sequence

from ga_model.base._messages import ALONE, EXACT_WAY, WITHOUT


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


def not_recorded_message(model: str, optimizers: list[str], attributes: Sequence[str] = ()) -> str:
    received = "which applies none"
    if optimizers:
        received = f"which applies {optimizers}, reached by a global variable or another object"
    if attributes:
        received += f" instead of {' and '.join(f'`self.{name}`' for name in attributes)}"
    return (
        "A `train_step` can be accumulated if its optimizers are attributes of the model, such as "
        "`self.optimizer`. "
        f"Received: `train_step` of {model!r}, {received}. "
        "Store each optimizer in an attribute of the model and call "
        f"`self.<attribute>.apply(gradients, variables)`, {ALONE} with any optimizer, "
        f"or {WITHOUT}."
    )


def product_message(loss: str, model: str) -> str:
    return (
        "With sample weights, a loss must return one value per sample to be accumulated exactly. "
        f"Received: the loss {loss!r} of {model!r}, which returns a single number; Keras "
        "multiplies it by the mean of the sample weights. Training differs from the full batch: "
        f"return one value per sample, or {EXACT_WAY}."
    )


def written_message(model: str, variables: list[str]) -> str:
    return (
        f"`train_step` of {model!r}, or a layer that it calls, writes to {variables}. This happens "
        "once per microbatch, on the full batch once per update. Do it in a method "
        "`on_update(self)` of the model, which runs after each update, or "
        f"{ALONE}."
    )


def one_weight_message(exact: list[str], approximate: list[str]) -> str:
    return (
        "The terms of this loss average over different things, but a microbatch has only one "
        f"weight. Exact: {exact}. Exact only if all microbatches weigh the same in each term and "
        f"all windows are full: {approximate}. "
        "Give the terms the same reduction, mask and sample weights, or override "
        "`AccumulatingModel.microbatch_weight`."
    )


def unheard_calls_message(model: str) -> str:
    return (
        f"No call of a layer goes by microbatches in `train_step` of {model!r}, which takes the "
        "memory of the full batch. Training is exact. To save the memory, keep networks in "
        "attributes of the model, and call them in `train_step` itself: not by `stateless_call`, "
        "nor in a nested `tf.function`."
    )


def whole_call_message(layer: str, reason: str) -> str:
    return (
        f"A call of {layer!r} cannot be split into microbatches and takes the memory of the full "
        f"batch (calls of layers inside it are split): {reason}. Training is exact. To save the "
        "memory, make every output have one row per sample that depends on no other sample, draw "
        "random numbers with `keras.random` and a `keras.random.SeedGenerator`, or move the part "
        "that needs all samples out of the layer, into `train_step` or the loss."
    )
