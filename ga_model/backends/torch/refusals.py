"""Refuse what the PyTorch backend does not support: checks and messages."""

from __future__ import annotations

from typing import Any

import keras
import torch

from ga_model.backends.torch.process_group import num_processes
from ga_model.base._internals import overwrites
from ga_model.core.messages import WITHOUT

_TENSORFLOW = "use the TensorFlow backend (`KERAS_BACKEND=tensorflow`), which supports it"


def check(model: keras.Model) -> None:
    """Raise ValueError if gradients overwrite variables, or it is unclear which processes train."""
    if overwritten := [v.path for v in model.trainable_variables if overwrites(v)]:
        raise ValueError(
            "On PyTorch, gradients that overwrite their variables, such as those of float8 layers, "
            f"cannot be accumulated. Received: {model.name!r} with {overwritten}. Train in another "
            f"precision, {_TENSORFLOW}, or {WITHOUT}."
        )
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "On PyTorch, gradients are accumulated across the processes of a "
            f"`torch.distributed` group. Received: {model.name!r} with a `keras.distribution`. "
            "Remove it and set `model.process_group = torch.distributed.group.WORLD`, "
            f"{_TENSORFLOW} (`tf.distribute`), or {WITHOUT}."
        )
    if num_processes() > 1 and model.process_group is None:
        raise ValueError(alone_message(repr(model.name), "model.process_group"))


def check_group(group: Any) -> None:
    """Raise TypeError or ValueError unless this process is in the group, or `group` is None."""
    distributed = torch.distributed
    is_available = distributed.is_available()
    if group is None or (is_available and isinstance(group, distributed.ProcessGroup)):
        return
    # `new_group` returns this in processes outside of the group.
    is_outside = is_available and group == distributed.GroupMember.NON_GROUP_MEMBER
    received = "a group without this process" if is_outside else repr(group)
    raise (ValueError if is_outside else TypeError)(
        "`process_group` must be a `torch.distributed.ProcessGroup` that includes this process. "
        f"Received: {received}. Call `torch.distributed.init_process_group` and pass "
        "`torch.distributed.group.WORLD`, or None to train alone."
    )


def compiled_message(model: str) -> str:
    return (
        "On PyTorch, `ga_model` cannot observe a step that `torch.compile` compiles. "
        f"Received: {model!r} with jit_compile=True. "
        "Pass `jit_compile=False` to `compile()`; you can still compile single layers with "
        "`torch.compile`."
    )


def closure_message(model: str) -> str:
    return (
        "With `accumulation_steps` above 1, an optimizer of `torch.optim` cannot compute the loss "
        f"again. Received: {model!r}, whose `train_step` passes a closure to `step`. "
        "Take the gradients before, and call `step()`, or split each batch by `microbatch_size` "
        "alone, where any step is exact."
    )


def foreign_message(model: str, optimizer: str) -> str:
    return (
        "An optimizer can be accumulated for if it updates trainable weights of the model. "
        f"Received: {model!r}, whose {optimizer!r} has other parameters. Keep the layers that have "
        "them in attributes of the model, or split each batch by `microbatch_size` alone, where "
        "any step is exact."
    )


def unknown_update_message(model: str) -> str:
    return (
        '`microbatch_size="auto"` tries steps without updates, which needs optimizers that are '
        f"attributes of the model. Received: {model!r}, whose `train_step` uses an optimizer "
        "stored elsewhere. Set `microbatch_size` to a number, such as 16, which works with any "
        "optimizer, or store the optimizer in an attribute of the model."
    )


def alone_message(subject: str, name: str) -> str:
    return (
        "With several processes, you must say whether they train together. "
        f"Received: {subject} in a group of {num_processes()} processes, and {name}=None. Pass "
        "`torch.distributed.group.WORLD` if all processes share each update. For a process that "
        "trains alone, pass a group of its own: "
        "`torch.distributed.new_group([rank], use_local_synchronization=True)`."
    )


def changed_message(layer: str, names: list[str]) -> str:
    return (
        "A call that is split into microbatches runs again when its gradient is taken, with the "
        f"same inputs. Received: a call of {layer!r} whose {names} was modified in between. Modify "
        "it after `loss.backward()`, pass a copy (`x.clone()`), or set `microbatch_size=None`."
    )
