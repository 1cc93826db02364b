"""A layer's call on some samples, as in both passes of a split call. It writes to no variable."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import torch

from ga_model.backends.torch.call_arguments import Arguments, Nest
from ga_model.base._call_again import CallContext, inside_of_call
from ga_model.base._internals import (
    keeping_call_context,
    layers_in,
    losses_of_scope,
    own_state,
    raw,
)
from ga_model.base._internals_torch import times_written
from ga_model.recording._metric_calls import waiting
from ga_model.recording._models import instances_in, unrecorded
from ga_model.recording._splitting import NotByRowsError


class Given(NamedTuple):
    """What a call gave.

    Attributes:
        outputs: without their tensors.
        tensors: in the outputs, and their masks.
        losses: that layers added: scalars.
        values: pairs of a variable and its value behind the call, as they were passed.
        written: variables that were written to.
    """

    outputs: Nest
    tensors: list[Any]
    losses: list[Any]
    values: list[tuple[Any, Any]]
    written: list[Any]


class _Scope(keras.StatelessScope):
    """Notes which variables are written to."""

    def __init__(self, values: list[tuple[Any, Any]]) -> None:
        super().__init__(values, collect_losses=True)
        self.written: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.written[id(update[0])] = update[0]
        super().add_update(update)


def run_on(
    layer: Any, arguments: Arguments, tensors: list[Any], training: Any, values: list[Any]
) -> Given:
    """Call a layer on some samples.

    Args:
        layer: the layer.
        arguments: of the call.
        tensors: in place of those of the arguments.
        training: whether the layer trains, or None.
        values: pairs of a variable and its value, of those that calls may change.

    Raises:
        NotByRowsError: outputs are not known.
    """
    args, kwargs = arguments.packed(tensors)
    if "training" in kwargs:
        kwargs["training"] = training
    scope = _Scope(values)
    with (
        unrecorded(),
        waiting(None),
        inside_of_call.set(True),
        keeping_call_context(),
        scope,
    ):
        # Keras's own, where `__call__` is the user's: that one runs once, around all samples.
        call = functools.partial(keras.layers.Layer.__call__, layer, *args, **kwargs)
        outputs = Nest(CallContext()(function=call, training=training))
    if any(map(_holds_tensors, outputs.others)):
        raise NotByRowsError("it returns tensors in an object that cannot be concatenated")
    # An activity regularizer adds its losses in `__call__`, around all samples.
    own = outputs.num_tensors if layer.activity_regularizer is not None else 0
    losses = losses_of_scope(scope)
    losses = [loss.sum() for loss in losses[: len(losses) - own]]
    after = [(v, scope.get_current_value(v).detach()) for v, _ in values]
    found = outputs.tensors
    return Given(outputs.emptied(), found, losses, after, list(scope.written.values()))


def _holds_tensors(value: Any) -> bool:
    attributes = [getattr(value, name, None) for name in getattr(value, "__slots__", ())]
    return bool(instances_in([*attributes, getattr(value, "__dict__", {})], torch.Tensor))


class KeptTensors:
    """What a call may write to past Keras: the state of layers, and tensors in attributes.

    Args:
        layer: the layer that is called.
    """

    def __init__(self, layer: Any) -> None:
        parts = layers_in(layer)
        modules = {id(m): m for part in parts for m in part.modules()}
        found = [(v.path, raw(v)) for part in parts for v in own_state(part)]
        found += [
            (f"the tensor `{name}` of {getattr(module, 'name', type(module).__name__)!r}", value)
            for module in modules.values()
            for name, value in vars(module).items()
            if torch.is_tensor(value) and not value.is_meta
        ]
        self._found = [(n, t, times_written(t), t.detach().clone()) for n, t in found]

    def written(self, by_value: bool = False) -> list[str]:
        """Return the names of those that were written to.

        Args:
            by_value: whether values are compared, which shows what is written through `.data`.
        """
        return [
            name
            for name, tensor, version, value in self._found
            if times_written(tensor) != version or (by_value and not _is_same(tensor, value))
        ]

    def put_back(self) -> None:
        """Let them be as they were."""
        for _, tensor, _, value in self._found:
            if not _is_same(tensor, value):
                tensor.detach().copy_(value)


def _is_same(tensor: Any, value: Any) -> bool:
    return bool(torch.equal(tensor.detach().nan_to_num(), value.nan_to_num()))


class Autocast:
    """The `torch.autocast` of a call, which it is made again in."""

    def __init__(self) -> None:
        devices = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
        self._dtypes = {
            device: torch.get_autocast_dtype(device)
            for device in devices
            if torch.is_autocast_enabled(device)
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a block in it. Weights are cast again: a cast without its gradient is not kept."""
        with ExitStack() as stack:
            for device, dtype in self._dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            yield
