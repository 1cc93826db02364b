"""What is said of steps that cannot be accumulated, or that train differently then."""

from __future__ import annotations

from ga_model.base._messages import ALONE, EXACT_WAY, WITHOUT


def noise_of_sum_message(model: str) -> str:
    return (
        "`GradientNoiseScale` needs a loss that is a mean, of which microbatches have weights. "
        f"Received: {model!r}, of which the loss is a sum. "
        'Make its reduction "sum_over_batch_size" or "mean_with_sample_weight", '
        "or train without the callback."
    )


def applied_twice_message(model: str, optimizer: str) -> str:
    return (
        "A `train_step` that applies one optimizer more than once cannot be accumulated: "
        "its second gradient would have to be taken after the first update. "
        f"Received: `train_step` of {model!r} applies the optimizer {optimizer!r} twice. "
        f"Sum the losses and apply once, use one optimizer per update, {ALONE} for any step, "
        f"or {WITHOUT}."
    )


def inner_graph_message(model: str) -> str:
    return (
        "A `train_step` that is accumulated must apply its optimizers in its own graph. "
        f"Received: `train_step` of {model!r} applies one inside of `tf.cond`, a loop, or a "
        "`tf.function` of its own. Move the call out of it (`skip_nonfinite=True` leaves out what "
        f"has NaN or Inf), {ALONE} for any step, or {WITHOUT}."
    )


def not_recorded_message(model: str, optimizers: list[str]) -> str:
    received = "applies none"
    if optimizers:
        received = f"applies {optimizers} by a global name or by an attribute of something else"
    return (
        "A `train_step` that is accumulated must apply optimizers that are attributes of the "
        "model, such as `self.optimizer`. "
        f"Received: `train_step` of {model!r} {received}. "
        "Keep each optimizer in an attribute of the model itself and call "
        f"`self.<attribute>.apply(gradients, variables)`, {ALONE} with any optimizer, "
        f"or {WITHOUT}."
    )


def not_scaled_message(model: str) -> str:
    return (
        "A loss that sums over samples, beside regularizers or means, is counted right only if "
        "`train_step` passes it through `self.optimizer.scale_loss(loss)` before taking gradients. "
        f"Received: `train_step` of {model!r} does not. Add that call, or make the loss a mean."
    )


def obstacle_message(subject: str, place: str, why: str) -> str:
    return (
        "The gradients of microbatches add up to that of the full batch if the loss is a sum over "
        "samples, or a sum divided by a number of samples or by a sum of weights. "
        f"Received: {subject}, in which {place} {why}. Training differs from the full batch; "
        f"`check_equivalence` measures by how much. To train as on the full batch, {EXACT_WAY}."
    )


def fixed_seed_message(subject: str, place: str) -> str:
    return (
        "Each microbatch draws random numbers of its own, which takes a seed that moves on. "
        f"Received: {subject}: {place} draws by a fixed seed, which gives the same numbers to "
        "every microbatch, and of the full batch to each sample others. Training differs from the "
        "full batch: pass a `keras.random.SeedGenerator` as the seed, or "
        f"{EXACT_WAY}."
    )


def product_message(loss: str, model: str) -> str:
    return (
        "Sample weights need a loss that returns a value for each sample, to be put together from "
        f"microbatches. Received: the loss {loss!r} of {model!r}, which returns one number, with "
        "sample weights: Keras multiplies it by their mean. Training differs from the full batch: "
        f"return the values of the samples, or {EXACT_WAY}."
    )


def order_message(model: str, first: str, second: str, variables: list[str]) -> str:
    return (
        "The optimizers of a `train_step` are applied at the end of a window, one after the other. "
        f"Received: `train_step` of {model!r}, which applies {first!r} and then computes with "
        f"{variables} before it applies {second!r}: with the full batch they are updated by then, "
        "and in a window they are not. Training differs from the full batch: take all gradients "
        f"before the first update, or {ALONE} for any order."
    )


def worked_over_message(model: str, place: str) -> str:
    return (
        "A window adds up the gradients of its microbatches before its optimizer gets them. "
        f"Received: `train_step` of {model!r}, which computes {place} of gradients: that is done "
        "for each microbatch, and with the full batch once per update. Training differs from the "
        "full batch: leave it to the optimizer (`global_clipnorm`, `clipnorm` and `clipvalue` "
        f"clip), set `skip_nonfinite=True` against NaN and Inf, or {ALONE} for any step."
    )


def own_gradient_message(model: str, rule: str) -> str:
    return (
        "The gradients of microbatches add up to that of the full batch if each is linear in what "
        "is passed back. "
        f"Received: {model!r} with {rule}, whose gradient is not known to "
        "be: one that clips, for example, clips other values of a microbatch than of the full "
        f"batch. Training differs from the full batch: {EXACT_WAY}."
    )


def shifted_message(model: str, place: str) -> str:
    return (
        "A window adds up the gradients of its microbatches. "
        f"Received: `train_step` of {model!r}, which adds something to gradients by {place} that "
        "does not follow from the samples, where the loss is a sum or was passed through "
        "`scale_loss`: it is added once for each microbatch, and with the full batch once per "
        "update. Training differs from the full batch: leave it to the optimizer (`weight_decay`), "
        f"or {ALONE} for any step."
    )


def unread_loss_message(model: str) -> str:
    return (
        "What the loss of a step averages over is read from its graph. "
        f"Received: `train_step` of {model!r}, of which it cannot be read: it runs eagerly, takes "
        "its gradients in a function of its own, or has ragged or sparse inputs. It is taken for a "
        "mean over samples, of which the gradients are applied as the tapes give them. If it is "
        f"something else, {EXACT_WAY}. If the step clips gradients, or takes some after an "
        f"update, {ALONE} for any step."
    )


def unlike_terms_message(model: str, denominators: list[str]) -> str:
    return (
        "One weight per microbatch cannot serve all terms of a loss that are divided by different "
        f"things. Received: `train_step` of {model!r} with terms that are divided by "
        f"{', and by '.join(denominators)}. The first is exact, and of the others training differs "
        f"from the full batch: {EXACT_WAY}."
    )


def written_message(model: str, variables: list[str]) -> str:
    return (
        f"`train_step` of {model!r}, or a layer that it calls, writes to {variables}. That happens "
        "once per microbatch, and with the full batch it happens once per update. Write to them in "
        "a method `on_update(self)` of the model, which runs after each update, or "
        f"{ALONE}."
    )


def one_weight_message(exact: list[str], approximate: list[str]) -> str:
    return (
        "One weight per microbatch cannot serve all terms of this loss: they average over "
        "different things. "
        f"Exact: {exact}. Exact only where microbatches count alike in each and windows are full: "
        f"{approximate}. Give the terms the same reduction, mask and sample weights, or override "
        "`AccumulatingModel.microbatch_weight`."
    )


def whole_call_message(layer: str, reason: str) -> str:
    return (
        f"A call of {layer!r} takes the memory of the full batch, but for the calls of layers in "
        f"it, because it cannot be split: {reason}. Training is exact. To save the memory, let "
        "every output have one row for each sample of the inputs and depend on no other sample, "
        "draw random numbers with `keras.random` and a `keras.random.SeedGenerator`, or move the "
        "part that needs all samples out of the layer, into `train_step` or the loss."
    )
