"""What is said where something can not be done, or is done in another way than one may think.

Every message says what was expected, what was received, and the way out. Those about arguments
stand in `_validate`.
"""

from __future__ import annotations

import re
from typing import Any

_LESS = (
    "Make the model or its rows smaller, compute in `mixed_float16`, or end what else takes the "
    "device's memory"
)
_ALONE = "use `microbatch_size` without `accumulation_steps` and `loss_over`, which is exact"
_WITHOUT = (
    "train without accumulation: "
    "`accumulation_steps=1`, `microbatch_size=None`, `skip_nonfinite=False`, "
    "and call `compile()` again"
)


def whole_call_message(layer: str, reason: str) -> str:
    return (
        f"A call of {layer!r} takes the memory of the full batch, but for the calls of layers in "
        f"it, because it cannot be split: {reason}. Training is exact. To save the memory, let "
        "every output have one row for each sample of the inputs and depend on no other sample, "
        "draw random numbers with `keras.random` and a `keras.random.SeedGenerator`, or move the "
        "part that needs all samples out of the layer, into `train_step` or the loss."
    )


def inner_call_message(layer: str) -> str:
    return (
        f"A call of {layer!r} takes the memory of the full batch, because `train_step` makes it "
        "inside of `tf.cond`, a loop, or a `tf.function` of its own. Training is exact. To save "
        "the memory, move the call out of it."
    )


def jacobian_message(layer: str) -> str:
    return (
        "A Jacobian cannot be vectorized through a call that goes by microbatches. "
        f"Received: the Jacobian of a call of {layer!r}. "
        "Pass `experimental_use_pfor=False` to `tape.jacobian` or `tape.batch_jacobian`, "
        "or set `microbatch_size=None`."
    )


def outputs_message(layer: str, shape: Any) -> str:
    return (
        "Where the calls of layers go by microbatches every output must have one row for each "
        f"sample of the inputs. Received: {layer!r} with an output of shape {shape} that has not. "
        "Set `microbatch_size=None`."
    )


def other_shape_message(layer: str, shape: Any) -> str:
    return (
        "Where the calls of layers go by microbatches the outputs of all microbatches must have "
        f"the same shape but for their rows. Received: {layer!r} with an output of shape {shape}, "
        "which differs. Pad it to a fixed length, or set `microbatch_size=None`."
    )


def skipped_message(model: str) -> str:
    return (
        f"Microbatches of {model!r} had NaN or Inf in their gradients and were left out, as "
        "`skip_nonfinite=True` asks. `model.num_skipped_microbatches` tells how many."
    )


def summed_rows_message(variables: list[str], optimizer: str) -> str:
    return (
        f"A window looked up more rows of {variables} than 1.25 times those of the table. To bound "
        "the memory, rows of equal ids were summed before the update. Of the full batch, "
        f"{optimizer!r} would get each lookup as a row of its own, and its update differs. Use "
        "fewer `accumulation_steps`, or `microbatch_size`, which sums nothing."
    )


def unbuilt_weights_message(optimizer: str) -> str:
    return (
        "An optimizer that begins with the values of the weights needs weights that have some. "
        f"Received: {optimizer!r}, and weights that its first `train_step` is making. Make "
        "the model anew, and call it, or each of its parts, on a batch before `fit`."
    )


def wrong_side_message(name: str) -> str:
    return (
        "`AccumulatingModel` must stand left of the Keras model class. "
        f"Received: class {name} with a Keras model class on its left. "
        f"Write `class {name}(AccumulatingModel, keras.Model)`."
    )


def no_keras_model_message(name: str) -> str:
    return (
        "`AccumulatingModel` is a mixin for Keras model classes. "
        f"Received: class {name}, which is no subclass of `keras.Model`. "
        f"Write `class {name}(AccumulatingModel, keras.Model)`."
    )


def class_attribute_message(name: str, setting: str, value: Any) -> str:
    return (
        f"`{setting}` must be set on the model and not on its class, where it would hide the "
        f"setting. Received: class {name} with {setting}={value!r}. "
        f"Pass it to `compile()`, or set `self.{setting}` in `__init__`."
    )


def not_a_model_message(value: Any, function: str = "accumulate") -> str:
    hint = "Call the class first" if isinstance(value, type) else "Make a `keras.Model` of it first"
    return (
        f"`{function}` takes a Keras model. "
        f"Received: model={value!r} (of type {type(value).__name__}). {hint}."
    )


def not_compiled_message(model: str) -> str:
    return (
        "`check_equivalence` trains a compiled model. "
        f"Received: {model!r}, which is not compiled. "
        "Call `model.compile()` with its optimizer and loss first."
    )


def no_targets_message(model: str) -> str:
    return (
        "The compiled loss needs targets. "
        f"Received: y=None for {model!r}. Pass x and y, or of a script return (model, x, y)."
    )


def one_device_message(model: str) -> str:
    return (
        "`check_equivalence` compares with plain Keras on one device. "
        f"Received: {model!r}, which was made under a strategy with several replicas. "
        "Make it without the strategy for the check: replicas make the updates of one device."
    )


def unbuilt_message(optimizers: list[str]) -> str:
    return (
        "`check_equivalence` puts optimizers back into the state that they were in, so they must "
        f"have one. Received: optimizers that are not built: {optimizers}. "
        "Call `optimizer.build(variables)` first, or compile without `run_eagerly=True`."
    )


def one_microbatch_message(
    rows: int, batch_size: int, accumulation_steps: int, microbatch_size: int | None
) -> str:
    return (
        "There must be at least two microbatches in a window, or there is nothing to compare. "
        f"Received: {rows} rows, batch_size={batch_size}, "
        f"accumulation_steps={accumulation_steps}, microbatch_size={microbatch_size}. "
        "Pass accumulation_steps > 1 or a smaller microbatch_size, or more rows."
    )


def not_accumulating_message(model: str) -> str:
    return (
        "`AccumulationScheduler` sets the `accumulation_steps` of a model that has them. "
        f"Received: {model!r}, which has not. Call `accumulate(model)` before `fit`."
    )


def no_microbatches_message(model: str) -> str:
    return (
        "`GradientNoiseScale` compares the microbatches of a model that has them. "
        f"Received: {model!r}, which has none. Call `accumulate(model)` before `fit`."
    )


def no_second_microbatch_message(model: str, microbatch_size: Any, loss_over: str) -> str:
    return (
        "`GradientNoiseScale` compares the microbatches of a window, and needs two or more that "
        "have a loss each. "
        f"Received: {model!r} with accumulation_steps=1, microbatch_size={microbatch_size}, "
        f"loss_over={loss_over!r}. Set `accumulation_steps` above 1, or with "
        "`loss_over='microbatch'` a `microbatch_size` of half of the batch or less."
    )


def measured_twice_message(model: str) -> str:
    return (
        "One `GradientNoiseScale` measures a model at a time. "
        f"Received: a second one for {model!r}. Keep one of them in `callbacks`."
    )


def noise_of_sum_message(model: str) -> str:
    return (
        "`GradientNoiseScale` needs a loss that is a mean, of which microbatches have weights. "
        f"Received: {model!r}, of which the loss is a sum. "
        'Make its reduction "sum_over_batch_size" or "mean_with_sample_weight", '
        "or train without the callback."
    )


def nothing_measured_message(model: str) -> str:
    return (
        "No gradient noise scale was measured: it takes windows of two microbatches or more. "
        f"Received: {model!r}, of which no window had two that have weight and finite gradients. "
        "Set `microbatch_size` to a half of the batch or less, or `accumulation_steps` above 1."
    )


def several_noise_scales_message(names: list[str]) -> str:
    return (
        "Each optimizer has a noise scale of its own, and there must be one only for this "
        f"attribute. Received: {len(names)} of them. "
        f"Give its name to `noise_scales`, one of {names}."
    )


def applied_twice_message(model: str, optimizer: str) -> str:
    return (
        "A `train_step` that applies one optimizer more than once can not be accumulated: "
        "its second gradient would have to be taken after the first update. "
        f"Received: `train_step` of {model!r} applies the optimizer {optimizer!r} twice. "
        "Sum the losses and apply once, use one optimizer per update, "
        f"or {_WITHOUT}."
    )


def changing_targets_message(model: str) -> str:
    return (
        "All microbatches of a batch must apply the same optimizers, in the same order. "
        f"Received: `train_step` of {model!r} applies others than in the microbatch before. "
        "Set `microbatch_size=None`, or let the step apply every optimizer every time."
    )


def inner_graph_message(model: str) -> str:
    return (
        "A `train_step` that is accumulated must apply its optimizers in its own graph. "
        f"Received: `train_step` of {model!r} applies one inside of `tf.cond`, a loop, or a "
        "`tf.function` of its own. Move the call out of it (a window with a bad microbatch is best "
        "skipped by a LossScaleOptimizer), "
        f"or {_WITHOUT}."
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
        f"`self.<attribute>.apply(gradients, variables)`, {_ALONE} with any optimizer, "
        f"or {_WITHOUT}."
    )


def not_scaled_message(model: str) -> str:
    return (
        "A loss that sums over rows, beside regularizers or means, is counted right only if "
        "`train_step` passes it through `self.optimizer.scale_loss(loss)` before taking gradients. "
        f"Received: `train_step` of {model!r} does not. Add that call, or make the loss a mean."
    )


def lengths_message(gradients: str, variables: str) -> str:
    return (
        "There must be one gradient per variable, in two lists. "
        f"Received: {gradients} and {variables}. "
        "Pass what `tape.gradient(loss, variables)` returns, with the same `variables`."
    )


def gradient_message(gradient: Any, variable: Any) -> str:
    return (
        "A gradient must have the shape of its variable. "
        f"Received: shapes {tuple(gradient.shape)} and {tuple(variable.shape)}. "
        "Pass what `tape.gradient(loss, variables)` returns, with the same `variables`."
    )


def not_an_optimizer_message(value: Any) -> str:
    hint = "Call the class first" if isinstance(value, type) else "Make one first"
    return (
        "`GradientAccumulator.apply` takes a Keras optimizer. "
        f"Received: optimizer={value!r} (of type {type(value).__name__}). "
        f"{hint}, such as `keras.optimizers.Adam()`."
    )


def unknown_variables_message() -> str:
    return (
        "A window's gradients must all belong to the same variables, in the same order. "
        "Received: other variables than in the first microbatch. "
        "After freezing or unfreezing layers call `model.compile()` again; "
        "in a loop of your own make a new `GradientAccumulator`."
    )


def late_gradient_message(variables: list[Any]) -> str:
    names = [getattr(variable, "path", variable.name) for variable in variables]
    return (
        "A variable without a gradient in the first microbatch can not get one later. "
        f"Received: a gradient for {names}. "
        "Let every microbatch use the same layers, or start with one that uses all of them."
    )


def empty_apply_message() -> str:
    return (
        "`GradientAccumulator.apply()` must know its variables where a `tf.function` traces it. "
        "Received: a call that was traced before any gradient was added. "
        "Call `add()` before `apply()` is traced for the first time, "
        "or put both into the same `tf.function`."
    )


def weight_message(weight: Any) -> str:
    return (
        "`weight` must be a scalar number or tensor, or None where the loss is a sum. "
        f"Received: weight={weight!r}. Pass what the microbatch's loss averages over, such as rows."
    )


def mixed_weights_message() -> str:
    return (
        "`weight` must be a number in every microbatch of a `GradientAccumulator`, or None in "
        "every one. Received: both. Pass None only where the loss is a sum."
    )


def strategy_message(name: str) -> str:
    return (
        "Accumulation works with OneDeviceStrategy, MirroredStrategy and "
        "MultiWorkerMirroredStrategy of `tf.distribute`. "
        f"Received: {name}, which it was not tried with. "
        "Make the model under one of those strategies or under none, "
        f"or {_WITHOUT}."
    )


def scope_message(elsewhere: list[str], name: str) -> str:
    return (
        "A model trains under the `tf.distribute` strategy that it was made and compiled under. "
        f"Received: {' and '.join(elsewhere)}, made outside of the scope of {name}. "
        "Make and compile the model inside of one `with strategy.scope():`, "
        "and call `fit` on it."
    )


def worker_message() -> str:
    return (
        "A worker of this cluster can not be reached any more: it was stopped, or it failed with "
        "an error of its own, which stands in its output. The others can not go on alone. "
        "Start all workers again; with `keras.callbacks.BackupAndRestore` they go on after the "
        "last epoch that they finished."
    )


def epochs_message(epoch: int) -> str:
    return (
        "All workers must begin with the same epoch. "
        f"Received: epoch {epoch} here (counted from 0) and another one on another worker, as when "
        "the last run ended while backups were written. "
        "Copy the backup directory of the worker that is furthest to the other workers."
    )


def accumulator_scope_message() -> str:
    return (
        "A `GradientAccumulator` belongs to the replicas of the `tf.distribute` strategy that it "
        "was made under. Received: a call from elsewhere. "
        "Make it inside of `with strategy.scope():`, as the model and the optimizer, and call it "
        "in what `strategy.run` runs."
    )


def synchronized_message(layers: list[str]) -> str:
    return (
        "Replicas can not exchange statistics inside of a microbatch loop or of XLA. "
        f"Received: BatchNormalization layers with `synchronized=True`: {layers}. "
        "Set `synchronized=False`, or `microbatch_size=None` and `jit_compile=False`, "
        "and call `compile()` again."
    )


def no_optimizer_message(model: str) -> str:
    return (
        "Keras's own `train_step` needs an optimizer. "
        f"Received: {model!r} compiled with optimizer=None. "
        "Pass one to `compile()`, or write a `train_step` with optimizers of its own."
    )


def rows_message(shapes: list[tuple[int | None, ...]] | None) -> str:
    received = "tensors of other numbers of rows" if shapes is None else f"shapes {shapes}"
    return (
        "`microbatch_size` splits the rows of a batch, axis 0 of its tensors, so all tensors must "
        f"have the same number of them. Received: {received}. "
        "A value that all rows share must be a scalar, or an attribute of the model. With parts "
        'that differ, such as labelled and unlabelled samples, take `loss_over="auto"` and a '
        "`train_step` of your own, which gets all of them; use `accumulation_steps`; or set "
        "`microbatch_size=None`."
    )


def found_in_graph(error: BaseException) -> str | None:
    """Return what this package has to say of an error that a graph raised as it ran, or None.

    In such an error it stands in between what TensorFlow tells of the graph.
    """
    starts = "`microbatch_size` splits|Where the calls of layers go"
    found = re.search(rf"assertion failed: \[((?:{starts})[^\]]*)\]([^|\n]*)", str(error))
    if found is None:
        return None
    numbers = [int(number) for number in re.findall(r"= \] \[(\d+)\]", found[2])]
    return found[1].replace("other numbers of rows", f"{' and '.join(map(str, numbers))} rows")


def found_message(size: int, failed: int | None, was_tried: bool) -> str:
    """Word what `microbatch_size="auto"` has found.

    Args:
        size: the rows of the largest microbatch that fits.
        failed: those of the smallest that does not, or None.
        was_tried: whether that one was tried, and not only predicted.
    """
    if failed is None:
        return f'microbatch_size="auto": the whole batch of {size} rows fits'
    why = "did not fit" if was_tried else "would take more memory than there is"
    return (
        f'microbatch_size="auto": {size} {"row goes" if size == 1 else "rows go"} through the '
        f"model at a time ({failed} {why})"
    )


def no_row_message(model: str) -> str:
    return (
        'With `microbatch_size="auto"` at least one row must fit in memory. '
        f"Received: {model!r}, whose forward and backward pass of 1 row does not fit. {_LESS}."
    )


def damaged_message(model: str, size: int) -> str:
    return (
        "A batch is not repeated where memory ran out in a function that XLA compiled, because "
        "TensorFlow may leave variables that it writes to damaged. "
        f"Received: {model!r} with jit_compile=True, which ran out of memory with {size} rows at a "
        "time. Start again from a backup or a saved model, and "
        f"set `microbatch_size` to a number such as {(size + 1) // 2}."
    )


def halved_message(model: str, size: int, half: int) -> str:
    return (
        f"A batch of {model!r} did not fit in memory any more with {size} rows at a time. It is "
        f"repeated with {half}, which is `model.microbatch_size` from now on. To look for a larger "
        'one again, set `model.microbatch_size = "auto"`.'
    )


def torn_message(model: str, size: int, is_own_step: bool) -> str:
    where = "in a `train_step` of its own" if is_own_step else "in the update"
    return (
        "A batch that does not fit is repeated only if its update has not begun. "
        f"Received: {model!r}, which ran out of memory {where}, with {size} rows at a time; "
        "some of its weights may have been updated and others not. Load the weights from before, "
        "from a backup say, and set `microbatch_size` to a smaller number, such as "
        f"{max(1, size // 2)}."
    )


def no_size_message(model: str) -> str:
    return (
        '`microbatch_size="auto"` is found by `fit` and `train_on_batch`, before their first '
        f"batch. Received: a call of `train_step` of {model!r} from elsewhere, before a size was "
        "found. Set `microbatch_size` to a number, or train a batch with `train_on_batch` first."
    )


def workers_size_message() -> str:
    return (
        "All workers must have the same `microbatch_size`, and each would find its own. "
        'Received: microbatch_size="auto" under MultiWorkerMirroredStrategy. '
        "Set it to a number that fits on every worker."
    )


def unknown_size_message(model: str) -> str:
    return (
        "`check_equivalence` compares with microbatches of a known number of rows. "
        f'Received: {model!r} with microbatch_size="auto", of which no size was found yet. '
        "Pass `microbatch_size` as a number."
    )


_EXACT_WAY = f"{_ALONE} for any loss, or override `microbatch_weight`"


def mixing_loss_message(subject: str, place: str) -> str:
    return (
        "The gradient of a window is put together from those of its microbatches, which takes a "
        "loss that is a sum over samples, or one that is divided by a number of samples or a sum "
        f"of weights. Received: {subject}: {place} computes with several samples. Training differs "
        f"from the full batch: {_EXACT_WAY}."
    )


def fixed_seed_message(subject: str, place: str) -> str:
    return (
        "Each microbatch draws random numbers of its own, which takes a seed that moves on. "
        f"Received: {subject}: {place} draws by a fixed seed, which gives the same numbers to "
        "every microbatch, and of the full batch to each sample others. Training differs from the "
        "full batch: pass a `keras.random.SeedGenerator` as the seed, or "
        f"{_EXACT_WAY}."
    )


def product_message(loss: str, model: str) -> str:
    return (
        "Sample weights need a loss that returns a value for each sample, to be put together from "
        f"microbatches. Received: the loss {loss!r} of {model!r}, which returns one number, with "
        "sample weights: Keras multiplies it by their mean. Training differs from the full batch: "
        f"return the values of the samples, or {_EXACT_WAY}."
    )


def uneven_parts_message(model: str) -> str:
    return (
        "A window weights a batch by one number of samples, which serves parts of the batch (such "
        "as labelled and unlabelled samples) whose numbers keep their ratio. Received: batches of "
        f"{model!r} whose ratio changes. Where a loss averages over several parts, training "
        f"differs from the full batch: keep the ratio, or {_EXACT_WAY}."
    )


def order_message(model: str, first: str, second: str, variables: list[str]) -> str:
    return (
        "The optimizers of a `train_step` are applied at the end of a window, one after the other. "
        f"Received: `train_step` of {model!r}, which applies {first!r} and then computes with "
        f"{variables} before it applies {second!r}: with the full batch they are updated by then, "
        "and in a window they are not. Training differs from the full batch: take all gradients "
        f"before the first update, or {_ALONE} for any order."
    )


def worked_over_message(model: str, place: str) -> str:
    return (
        "A window adds up the gradients of its microbatches before its optimizer gets them. "
        f"Received: `train_step` of {model!r}, which computes {place} of gradients: that is done "
        "for each microbatch, and with the full batch once per update. Training differs from the "
        "full batch: leave it to the optimizer (`global_clipnorm`, `clipnorm` and `clipvalue` "
        f"clip), or {_ALONE} for any step."
    )


def shifted_message(model: str, place: str) -> str:
    return (
        "A window adds up the gradients of its microbatches. "
        f"Received: `train_step` of {model!r}, which adds something to gradients by {place} that "
        "does not follow from the samples, where the loss is a sum or was passed through "
        "`scale_loss`: it is added once for each microbatch, and with the full batch once per "
        "update. Training differs from the full batch: leave it to the optimizer (`weight_decay`), "
        f"or {_ALONE} for any step."
    )


def unread_loss_message(model: str) -> str:
    return (
        "What the loss of a step averages over is read from its graph. "
        f"Received: `train_step` of {model!r}, of which it cannot be read: it runs eagerly, takes "
        "its gradients in a function of its own, or has ragged or sparse inputs. It is taken for a "
        "mean over samples, of which the gradients are applied as the tapes give them. If it is "
        f"something else, {_EXACT_WAY}. If the step clips gradients, or takes some after an "
        f"update, {_ALONE} for any step."
    )


def unlike_terms_message(model: str, denominators: list[str]) -> str:
    return (
        "One weight per microbatch can not serve all terms of a loss that are divided by different "
        f"things. Received: `train_step` of {model!r} with terms that are divided by "
        f"{', and by '.join(denominators)}. The first is exact: {_EXACT_WAY}."
    )


def written_message(model: str, variables: list[str]) -> str:
    return (
        f"`train_step` of {model!r}, or a layer that it calls, writes to {variables}. That happens "
        "once per microbatch, and with the full batch it happens once per update. Write to them in "
        "a method `on_update(self)` of the model, which runs after each update, or "
        f"{_ALONE}."
    )


def batch_normalization_message(layers: list[str]) -> str:
    return (
        f"BatchNormalization layers in training mode: {layers}. They normalize each microbatch by "
        "its own statistics and move their running averages once per microbatch, so training "
        "differs from the whole batch. Freeze them (`layer.trainable = False` before `compile`), "
        "use LayerNormalization or GroupNormalization, or accept the difference."
    )


def unreduced_message(terms: list[str]) -> str:
    return (
        "A loss without reduction can not stand beside other terms: Keras adds the others once per "
        f"loss value. Received: terms {terms}, one of them with reduction None. "
        "Give it the reduction 'sum' or 'sum_over_batch_size'."
    )


def bad_rule_message(value: str) -> str:
    return (
        "`microbatch_weight` must return a number, a scalar tensor, 'sum' or None. "
        f"Received: {value!r}. Return 'sum' where the loss is a sum over rows."
    )


def own_fit_message(model: str) -> str:
    return (
        "Windows are closed at an epoch's end by a callback. "
        f"Received: {model!r} with a `fit` of its own that takes no `callbacks`. "
        "Let it take `**kwargs` and pass them on to `super().fit`, or set `accumulation_steps=1`."
    )


def open_window_message(model: str) -> str:
    return (
        "Windows are closed at an epoch's end by a callback. "
        f"Received: {model!r} with a `fit` of its own that calls none and has left a window open. "
        "Pass `callbacks` on to `super().fit`, or call `close_window()` where an epoch ends."
    )


def instance_step_message(model: str) -> str:
    return (
        "`train_step` must be a method of the model's class. "
        f"Received: {model!r} with `train_step` set on the instance, which would not accumulate. "
        "Define it in a subclass, "
        f"or {_WITHOUT}."
    )


def one_weight_message(exact: list[str], approximate: list[str]) -> str:
    return (
        "One weight per microbatch can not serve all terms of this loss: they average over "
        "different things. "
        f"Exact: {exact}. Exact only where microbatches count alike in each and windows are full: "
        f"{approximate}. Give the terms the same reduction, mask and sample weights, or override "
        "`AccumulatingModel.microbatch_weight`."
    )
