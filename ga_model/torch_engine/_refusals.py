"""What cannot be done where Keras runs on PyTorch, and what is said of it."""

from __future__ import annotations

from typing import Any

import keras
import torch

from ga_model.base._messages import ALONE, WITHOUT
from ga_model.hearing._models import instances_in
from ga_model.torch_engine._process_group import num_processes

_TO_BE_EXACT = (
    "Training differs from the full batch. To train as on the full batch, pass `fit` the full "
    'batch, and set `microbatch_size` with `loss_over="batch"` in place of `accumulation_steps`'
)
_TENSORFLOW = "train on TensorFlow (`KERAS_BACKEND=tensorflow`), which does"


def check_variables(model: Any) -> None:
    """Raise ValueError if gradients overwrite variables, or it is not said who trains the model."""
    overwritten = [v.path for v in model.trainable_variables if _overwrites(v)]
    if overwritten:
        raise ValueError(_overwritten_message(model.name, overwritten))
    if keras.distribution.distribution() is not None:
        raise ValueError(_distribution_message(model.name))
    if num_processes() > 1 and model.process_group is None:
        raise ValueError(alone_message(repr(model.name), "model.process_group"))


def check(model: Any) -> None:
    """Raise ValueError if a model holds optimizers of PyTorch, or as `check_variables`."""
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
    """Raise TypeError or ValueError unless this process is one of a group, or there is none."""
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
        "Where Keras runs on PyTorch, `ga_model` hears a step as it runs, which `torch.compile` "
        f"does not let it. Received: {model!r} with jit_compile=True. "
        "Pass `jit_compile=False` to `compile()`, and compile layers of your own by "
        "`torch.compile` if you want to."
    )


def _torch_optimizer_message(model: str) -> str:
    return (
        "A window updates through optimizers of Keras. "
        f"Received: {model!r}, which holds an optimizer of `torch.optim`. "
        "Use one of `keras.optimizers`, whose updates PyTorch computes as well, "
        f"or {WITHOUT}."
    )


def unknown_update_message(model: str) -> str:
    return (
        '`microbatch_size="auto"` tries a step without its updates, which it knows of optimizers '
        f"of Keras that are attributes of the model. Received: {model!r}, whose `train_step` "
        "updates through one of `torch.optim`, or one that it reaches otherwise. Set "
        "`microbatch_size` to a number, such as 16, with which any optimizer is let through; or "
        "keep an optimizer of `keras.optimizers` in an attribute of the model."
    )


def _overwritten_message(model: str, variables: list[str]) -> str:
    return (
        "Where Keras runs on PyTorch, gradients that are new values of their variables cannot be "
        f"accumulated, as those of float8 layers are. Received: {model!r} with {variables}. "
        f"Train in another precision, {_TENSORFLOW}, or {WITHOUT}."
    )


def _distribution_message(model: str) -> str:
    return (
        "Where Keras runs on PyTorch, gradients are accumulated over the processes of a "
        f"`torch.distributed` group. Received: {model!r} with a `keras.distribution`. "
        "Remove it and set `model.process_group = torch.distributed.group.WORLD`, "
        f"{_TENSORFLOW} (`tf.distribute`), or {WITHOUT}."
    )


def alone_message(subject: str, name: str) -> str:
    return (
        "Where several processes run, it has to be said whether they train together. "
        f"Received: {subject} in a group of {num_processes()} processes, and {name}=None. Pass "
        "`torch.distributed.group.WORLD` for updates of the batches of all processes, or for a "
        "process that trains alone a group that it has for itself, "
        "`torch.distributed.new_group([rank], use_local_synchronization=True)`."
    )


def sum_with_regularizers_message(model: str) -> str:
    return (
        "With several processes, a loss that is a sum cannot stand beside weight regularizers: "
        "each process would add them. "
        f"Received: {model!r} with both. Use a loss that is a mean, or `weight_decay`."
    )


def _group_message(group: str) -> str:
    return (
        "`process_group` must be a `torch.distributed.ProcessGroup` that this process is in. "
        f"Received: {group}. Call `torch.distributed.init_process_group` and pass "
        "`torch.distributed.group.WORLD`, or None to train alone."
    )


def unknown_loss_message(model: str) -> str:
    return (
        "Where Keras runs on PyTorch, what a `train_step` or `compute_loss` of one's own averages "
        "over is found out by trying: its gradients of a microbatch are compared with those of the "
        "halves. "
        f"Received: {model!r}, whose gradients are those of no mean and of no sum over samples, or "
        "do not tell, where the step draws random numbers. Override `microbatch_weight` to say "
        "what a microbatch counts: return the number of samples where the loss is their mean, or "
        f'"sum". Or {ALONE}.'
    )


def worked_over_message(model: str) -> str:
    return (
        "A window adds up the gradients of its microbatches before its optimizer gets them. "
        f"Received: `train_step` of {model!r}, which applies something else than the gradients "
        "that PyTorch gave, such as clipped ones: that is done for each microbatch, and with the "
        "full batch once per update. Leave it to the optimizer (`global_clipnorm`, `clipnorm`, "
        f"`clipvalue` clip, `weight_decay` decays), or {ALONE}."
    )


def several_optimizers_message(model: str) -> str:
    return (
        "The optimizers of a `train_step` are applied at the end of a window, one after the other. "
        f"Received: `train_step` of {model!r}, which applies several. If it computes with what the "
        "first has updated before it applies the next, training differs from the full batch: take "
        f"all gradients before the first update, or {ALONE}."
    )


def not_additive_message(subject: str) -> str:
    return (
        "The gradients of microbatches add up to that of the full batch if the loss is a sum over "
        "samples, or a sum divided by their number. "
        f"Received: {subject}, which gives other gradients for the samples of a microbatch than "
        "for its halves: it compares samples, or divides by something else than their number, or "
        f"draws random numbers. {_TO_BE_EXACT}, or override `microbatch_weight` if the loss is a "
        "sum divided by something."
    )


def mixing_message(model: str) -> str:
    return (
        "The gradients of microbatches add up to that of the full batch if a model treats samples "
        f"one by one. Received: {model!r}, whose outputs for a sample depend on the others of its "
        f"microbatch. {_TO_BE_EXACT}."
    )


def changed_message(layer: str, names: list[str]) -> str:
    return (
        "A call that goes by microbatches is made again for its gradient, with what it was made of "
        "first. "
        f"Received: a call of {layer!r}, of which {names} was written to between the call and the "
        "gradient. Write to it after `loss.backward()`, pass a copy (`x.clone()`), or set "
        "`microbatch_size=None`."
    )


def own_averages_message(layers: list[str]) -> str:
    return (
        "Processes that train together share gradients, and not what layers write in training. "
        f"Received: BatchNormalization layers {layers}, whose running averages become those of a "
        "process's own samples. Take those of one process for all, freeze them "
        "(`layer.trainable = False` before `compile`), or use LayerNormalization or "
        "GroupNormalization."
    )


def unreadable_addition_message(model: str) -> str:
    return (
        "A loss that a layer adds by `add_loss` has to be a mean or a sum over samples. "
        f"Received: {model!r} with one that is neither. {_TO_BE_EXACT}."
    )
