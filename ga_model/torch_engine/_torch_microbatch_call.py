"""A layer's call on some samples, as in both passes of a split call. It writes nothing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import keras
import torch

from ga_model.base._call_again import CallContext, inside_of_call
from ga_model.base._internals import keeping_call_context, losses_of_scope, mask_of
from ga_model.hearing._models import instances_in, unrecorded
from ga_model.torch_engine._torch_arguments import Arguments


@dataclasses.dataclass(frozen=True)  # which no nest is taken for
class Place:
    """Stands where a tensor does: its number in the order of `keras.tree.flatten`."""

    number: int


class Form(NamedTuple):
    """How the outputs of a call are put together.

    Attributes:
        outputs: as the call gave them, with a `Place` for each tensor.
        num_tensors: in it.
        masked: numbers of those that have a mask.
        holds_objects: whether other objects in it hold tensors.
    """

    outputs: Any
    num_tensors: int
    masked: list[int]
    holds_objects: bool


class Given(NamedTuple):
    """What a call gave.

    Attributes:
        form: of the outputs.
        tensors: in the outputs, and their masks.
        losses: that layers added: scalars.
        values: of the variables that calls change, behind it.
        written: variables that were written to.
    """

    form: Form
    tensors: list[Any]
    losses: list[Any]
    values: list[tuple[Any, Any]]
    written: list[Any]


class _Scope(keras.StatelessScope):
    """Keeps what is written, by the variable."""

    def __init__(self, values: list[tuple[Any, Any]]) -> None:
        super().__init__(values, collect_losses=True)
        self.written: list[Any] = []

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.written.append(update[0])
        super().add_update(update)


def run_on(
    layer: Any, arguments: Arguments, tensors: list[Any], training: Any, values: list[Any]
) -> Given:
    """Call a layer on some samples, and write nothing.

    Args:
        layer: the layer.
        arguments: of the call.
        tensors: in place of those of the arguments.
        training: whether the layer trains, or None.
        values: pairs of a variable and its value, where that is another.
    """
    args, kwargs = arguments.packed(tensors)
    if "training" in kwargs:
        kwargs["training"] = training
    scope = _Scope(values)
    with unrecorded(), inside_of_call.set(True), keeping_call_context(), scope:
        # Keras's own, where `__call__` is the user's: that one runs once, around all samples.
        call = functools.partial(keras.layers.Layer.__call__, layer, *args, **kwargs)
        outputs = CallContext()(function=call, training=training)
    found = [leaf for leaf in keras.tree.flatten(outputs) if torch.is_tensor(leaf)]
    masks = [mask_of(tensor) for tensor in found]
    masked = [number for number, mask in enumerate(masks) if mask is not None]
    own = len(found) if layer.activity_regularizer is not None else 0  # added in `__call__`
    losses = losses_of_scope(scope)
    losses = [loss.sum() for loss in losses[: len(losses) - own]]
    changed = {id(v): v for v in scope.written}
    kept = {id(v): (v, value) for v, value in values}
    kept.update({k: (v, scope.get_current_value(v).detach()) for k, v in changed.items()})
    others = [leaf for leaf in keras.tree.flatten(outputs) if not torch.is_tensor(leaf)]
    # `flatten` sorts the keys of dicts, and `map_structure` takes them as they are.
    places = {id(tensor): Place(number) for number, tensor in enumerate(found)}
    outputs = keras.tree.map_structure(lambda leaf: places.get(id(leaf), leaf), outputs)
    form = Form(outputs, len(found), masked, any(map(_holds_tensors, others)))
    tensors = [*found, *(mask for mask in masks if mask is not None)]
    return Given(form, tensors, losses, list(kept.values()), list(changed.values()))


def _holds_tensors(value: Any) -> bool:
    attributes = [getattr(value, name, None) for name in getattr(value, "__slots__", ())]
    return bool(instances_in([*attributes, getattr(value, "__dict__", {})], torch.Tensor))
