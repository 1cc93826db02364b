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


def not_scaled_message(model: str) -> str:
    return (
        "A loss that sums over samples and also has regularizers or means is accumulated correctly "
        "only if `train_step` calls `self.optimizer.scale_loss(loss)` before it takes gradients. "
        f"Received: `train_step` of {model!r}, which does not. "
        "Add that call, or make the loss a mean."
    )


def obstacle_message(subject: str, place: str, why: str) -> str:
    return (
        "Gradients of microbatches add up to the full-batch gradient only if the loss is a sum "
        "over samples, or such a sum divided by a number of samples or by a sum of weights. "
        f"Received: {subject}, in which {place} {why}. Training differs from the full batch; "
        f"`check_equivalence` measures by how much. To train exactly, {EXACT_WAY}."
    )


def computed_count_message(model: str, number: str, place: str, rows: int) -> str:
    return (
        "What Python computes with a number of samples (`x.shape[0]`) is a constant of the graph, "
        "and so is that of a microbatch. "
        f"Received: {model!r}, in which {place} computes with {number}, where a microbatch has "
        f"{rows} samples; with another number of samples it is another. Training differs from the "
        f"full batch: use the mean, or `tf.shape(x)[0]`, or {EXACT_WAY}."
    )


def constant_count_message(model: str, number: str, place: str, rows: int) -> str:
    return (
        "A sum over samples that is divided by their number is a mean, and divided by anything "
        "else is a sum. "
        f"Received: {model!r}, in which {place} divides by the constant {number}, which goes with "
        f"the {rows} samples of a microbatch, but does not follow from them. It is taken for their "
        "number: if that is not meant, training differs from the full batch. Use the mean, or "
        f"`tf.shape(x)[0]`, or {EXACT_WAY}."
    )


def fixed_seed_message(subject: str, place: str) -> str:
    return (
        "A fixed seed repeats the same random numbers in every microbatch. "
        f"Received: {subject}: {place} draws with a fixed seed, so samples of different "
        "microbatches share their random numbers. Training differs from the full batch: pass a "
        f"`keras.random.SeedGenerator` as the seed, or {EXACT_WAY}."
    )


def product_message(loss: str, model: str) -> str:
    return (
        "With sample weights, a loss must return one value per sample to be accumulated exactly. "
        f"Received: the loss {loss!r} of {model!r}, which returns a single number; Keras "
        "multiplies it by the mean of the sample weights. Training differs from the full batch: "
        f"return one value per sample, or {EXACT_WAY}."
    )


def order_message(model: str, first: str, second: str, variables: list[str]) -> str:
    return (
        "A window applies all optimizers of a `train_step` at its end, one after the other. "
        f"Received: `train_step` of {model!r}, which applies {first!r} and then computes with "
        f"{variables} before it applies {second!r}: on the full batch these are updated by then, "
        "in a window they are not. Training differs from the full batch: take all gradients "
        f"before the first update, or {ALONE} for any order."
    )


def late_values_message(model: str, optimizer: str, variables: list[str]) -> str:
    return (
        "A window applies optimizers at its end. "
        f"Received: `train_step` of {model!r}, which applies {optimizer!r} and then computes logs "
        f"or metrics with {variables}: on the full batch these are updated by then, in a window "
        "they are not. Logs differ from the full batch, and weights do not: compute them before "
        f"the update, or {ALONE} for any order."
    )


def worked_over_message(model: str, place: str) -> str:
    return (
        "Gradients must reach the optimizer unchanged, because a window sums them first. "
        f"Received: `train_step` of {model!r}, which computes {place} of gradients: in a window "
        "this happens once per microbatch, on the full batch once per update. Training differs "
        "from the full batch: let the optimizer do it (`global_clipnorm`, `clipnorm`, "
        f"`clipvalue`), set `skip_nonfinite=True` to skip NaN and Inf, or {ALONE} for any step."
    )


def own_gradient_message(model: str, rule: str) -> str:
    return (
        "Gradients of microbatches add up to the full-batch gradient only if every custom gradient "
        "is linear in the upstream gradient and separate for each sample. "
        f"Received: {model!r} with {rule}, which may not be: one that clips, for example, clips "
        "different values per microbatch, and one that subtracts a mean subtracts a different one. "
        f"Training differs from the full batch: {EXACT_WAY}."
    )


def shifted_message(model: str, place: str) -> str:
    return (
        "Gradients must reach the optimizer unchanged, because a window sums them first. "
        f"Received: `train_step` of {model!r}, which adds a term to gradients by {place} that "
        "does not depend on the samples, with a loss that is a sum or was passed through "
        "`scale_loss`: in a window it is added once per microbatch, on the full batch once per "
        "update. Training differs from the full batch: let the optimizer do it (`weight_decay`), "
        f"or {ALONE} for any step."
    )


def unread_loss_message(model: str) -> str:
    return (
        "What a custom loss averages over is read from the graph of the step. "
        f"Received: `train_step` of {model!r}, whose graph cannot be read: it runs eagerly, takes "
        "gradients in a nested function, has ragged or sparse inputs, or an operation in a form "
        "that is not known. Its loss and the numbers that it logs are assumed to be means over "
        "samples, its gradients to reach the optimizer unchanged, and custom gradients to be "
        "linear and separate for each sample. If the loss is something else, "
        f"{EXACT_WAY}. If the step clips gradients, takes some after an update, or changes a "
        f"learning rate or a metric that it computes with, {ALONE} for any step."
    )


def unlike_terms_message(subject: str, denominators: list[str]) -> str:
    return (
        "The terms of a loss are divided by different things, but a microbatch has only one "
        f"weight. Received: {subject} with terms divided by "
        f"{', and by '.join(denominators)}. Only the first is exact; for the others, training "
        f"differs from the full batch: {EXACT_WAY}."
    )


def eager_loss_message(subject: str, denominator: str) -> str:
    return (
        "With `run_eagerly=True`, a loss that returns a single number for all samples is taken as "
        f"a mean over samples, or with `reduction='sum'` as a sum. Received: {subject}, which is "
        f"divided by {denominator}. Return one value per sample, train without `run_eagerly=True`, "
        f"or {ALONE}."
    )


def written_message(model: str, variables: list[str]) -> str:
    return (
        f"`train_step` of {model!r}, or a layer that it calls, writes to {variables}. This happens "
        "once per microbatch, on the full batch once per update. Do it in a method "
        "`on_update(self)` of the model, which runs after each update, or "
        f"{ALONE}."
    )


def metrics_used_message(model: str, variables: list[str]) -> str:
    return (
        "A metric is updated once per microbatch of a window, on the full batch once per update. "
        f"Received: `train_step` of {model!r}, whose gradients depend on {variables} of a metric "
        "that it updates. Training differs from the full batch: log metrics only, and compute with "
        f"a variable that `on_update(self)` assigns, or {ALONE} for any step."
    )


def number_of_batches_message(model: str, number: str, place: str, is_split: bool) -> str:
    way_out = 'set `loss_over="batch"`' if is_split else ALONE
    return (
        "A number that a metric or a log has of each batch is put together from microbatches, "
        "which is exact for one mean or sum over samples. Received: "
        f"{number} of {model!r}, made by {place}. It may differ from that of the full batch, "
        f"with no effect on weights. Return one value per sample, or {way_out}."
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
