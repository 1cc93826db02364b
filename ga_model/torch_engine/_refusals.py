"""What is not supported on the PyTorch backend: checks, errors and warnings."""

from __future__ import annotations

from typing import Any

import keras
import torch

from ga_model.base._messages import ALONE, WITHOUT
from ga_model.hearing._models import instances_in
from ga_model.torch_engine._process_group import num_processes

_TO_BE_EXACT = (
    "Training differs from the full batch. To train exactly, pass `fit` the full batch and set "
    '`microbatch_size` with `loss_over="batch"` instead of `accumulation_steps`'
)
_TENSORFLOW = "use the TensorFlow backend (`KERAS_BACKEND=tensorflow`), which supports it"


def check_variables(model: Any) -> None:
    """Raise ValueError if gradients overwrite variables, or it is unclear which processes train."""
    overwritten = [v.path for v in model.trainable_variables if _overwrites(v)]
    if overwritten:
        raise ValueError(_overwritten_message(model.name, overwritten))
    if keras.distribution.distribution() is not None:
        raise ValueError(_distribution_message(model.name))
    if num_processes() > 1 and model.process_group is None:
        raise ValueError(alone_message(repr(model.name), "model.process_group"))


def check(model: Any) -> None:
    """Raise ValueError if a model has optimizers of PyTorch, or as `check_variables` does."""
    if instances_in(list(vars(model).values()), torch.optim.Optimizer):
        raise ValueError(_torch_optimizer_message(model.name))
    check_variables(model)


def check_trial(model: Any) -> None:
    """Raise ValueError if a step cannot be tried without its updates."""
    if instances_in(list(vars(model).values()), torch.optim.Optimizer):
        raise ValueError(unknown_update_message(model.name))


def _overwrites(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))


def check_group(group: Any) -> None:
    """Raise TypeError or ValueError unless this process is in the group, or `group` is None."""
    distributed = torch.distributed
    if group is None:
        return
    if distributed.is_available():
        if isinstance(group, distributed.ProcessGroup):
            return
        if group == distributed.GroupMember.NON_GROUP_MEMBER:  # what `new_group` gives the others
            raise ValueError(_group_message("a group without this process"))
    raise TypeError(_group_message(repr(group)))


def compiled_message(model: str) -> str:
    return (
        "On PyTorch, `ga_model` cannot observe a step that `torch.compile` compiles. "
        f"Received: {model!r} with jit_compile=True. "
        "Pass `jit_compile=False` to `compile()`; you can still compile single layers with "
        "`torch.compile`."
    )


def _torch_optimizer_message(model: str) -> str:
    return (
        "Windows are applied by Keras optimizers. "
        f"Received: {model!r}, which has an optimizer of `torch.optim`. "
        "Use one of `keras.optimizers`, which run on PyTorch too, "
        f"or {WITHOUT}."
    )


def unknown_update_message(model: str) -> str:
    return (
        '`microbatch_size="auto"` tries steps without updates, which needs Keras optimizers that '
        f"are attributes of the model. Received: {model!r}, whose `train_step` uses an optimizer "
        "of `torch.optim`, or one stored elsewhere. Set `microbatch_size` to a number, such as 16, "
        "which works with any optimizer, or store an optimizer of `keras.optimizers` in an "
        "attribute of the model."
    )


def _overwritten_message(model: str, variables: list[str]) -> str:
    return (
        "On PyTorch, gradients that overwrite their variables, such as those of float8 layers, "
        f"cannot be accumulated. Received: {model!r} with {variables}. Train in another precision, "
        f"{_TENSORFLOW}, or {WITHOUT}."
    )


def _distribution_message(model: str) -> str:
    return (
        "On PyTorch, gradients are accumulated across the processes of a "
        f"`torch.distributed` group. Received: {model!r} with a `keras.distribution`. "
        "Remove it and set `model.process_group = torch.distributed.group.WORLD`, "
        f"{_TENSORFLOW} (`tf.distribute`), or {WITHOUT}."
    )


def alone_message(subject: str, name: str) -> str:
    return (
        "With several processes, you must say whether they train together. "
        f"Received: {subject} in a group of {num_processes()} processes, and {name}=None. Pass "
        "`torch.distributed.group.WORLD` if all processes share each update. For a process that "
        "trains alone, pass a group of its own: "
        "`torch.distributed.new_group([rank], use_local_synchronization=True)`."
    )


def sum_with_regularizers_message(model: str) -> str:
    return (
        "With several processes, a loss that is a sum cannot be combined with weight regularizers: "
        "each process would add them. "
        f"Received: {model!r} with both. Use a loss that is a mean, or `weight_decay`."
    )


def _group_message(group: str) -> str:
    return (
        "`process_group` must be a `torch.distributed.ProcessGroup` that includes this process. "
        f"Received: {group}. Call `torch.distributed.init_process_group` and pass "
        "`torch.distributed.group.WORLD`, or None to train alone."
    )


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


def changed_message(layer: str, names: list[str]) -> str:
    return (
        "A call that is split into microbatches runs again when its gradient is taken, with the "
        f"same inputs. Received: a call of {layer!r} whose {names} was modified in between. Modify "
        "it after `loss.backward()`, pass a copy (`x.clone()`), or set `microbatch_size=None`."
    )


def own_averages_message(layers: list[str]) -> str:
    return (
        "Processes that train together share gradients, but not the running averages of layers. "
        f"Received: BatchNormalization layers {layers}, whose running averages cover only the "
        "process's own samples. Use those of one process for all, freeze them "
        "(`layer.trainable = False` before `compile`), or use LayerNormalization or "
        "GroupNormalization."
    )


def unreadable_addition_message(model: str) -> str:
    return (
        "A loss added with `add_loss` must be a mean or a sum over samples. "
        f"Received: {model!r} with one that is neither. {_TO_BE_EXACT}."
    )
