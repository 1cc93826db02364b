"""Run a step on a full batch, and its calls of layers by microbatches.

As on TensorFlow (`calls/_calls.py`): the step runs once, as it is, on the full batch. Only the
outermost calls of layers in it go by microbatches (`_torch_split_call`). A call that cannot be
split runs whole, and the calls that it makes are then the outermost ones: always exact, at the cost
of memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from ga_model.base._call_again import inside_of_call
from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront
from ga_model.base._internals import (
    is_built,
    is_rematerialized,
    is_symbolic,
    layers_in,
    stateless_scope,
    training_of_call,
)
from ga_model.base._messages import batch_normalization_messages
from ga_model.hearing._messages import whole_call_message
from ga_model.torch_engine._torch_arguments import Arguments, NotByRowsError
from ga_model.torch_engine._torch_call_checks import kinds_of_losses
from ga_model.torch_engine._torch_split_call import SplitCall
from ga_model.torch_engine._torch_statistics import heard_layers

_splitting = ThreadValue()  # how calls are split in this thread, or None

# Of each layer, what is known of the kinds of calls that were tried: what the losses are that it
# adds, or why it cannot be split.
_tried: weakref.WeakKeyDictionary[Any, dict[str, list[str] | str]] = weakref.WeakKeyDictionary()


class _Splitting:
    """How the calls of one step are split.

    Args:
        model: the model whose step runs.
        rows: samples of its batch.
        size: samples per microbatch.
    """

    def __init__(self, model: Any, rows: int, size: int) -> None:
        self._model = model
        self._rows = rows
        self._size = size
        self._scope = stateless_scope()
        self._is_in_whole_call = ThreadValue(False)

    def applies(self, layer: Any) -> bool:
        """Return whether a call of a layer that runs here is to be split."""
        if inside_of_call.get() or is_symbolic() or stateless_scope() is not self._scope:
            return False
        if any(map(is_rematerialized, layers_in(layer))):
            return False
        # A layer without weights draws random numbers, or computes little.
        return bool(layer.weights or not is_built(layer))

    def run(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call by microbatches, or whole where it cannot be split."""
        training = kwargs.get("training", training_of_call(layer))
        try:
            arguments = Arguments(args, kwargs, self._rows, self._size)
            if len(arguments.shares()) == 1:
                raise NotByRowsError("")
            _build(layer, arguments)
            split = SplitCall(layer, arguments, training, _kinds_of(layer, arguments, training))
            outputs = split.outputs()
            for message in batch_normalization_messages(*split.normalizing):
                self._model._warn_once(message)
            return outputs
        except NotByRowsError as error:
            reason = str(error)
        with self._is_in_whole_call.set(True):
            outputs = call(*args, **kwargs)
        if reason and not self._is_in_whole_call.get():
            self._model._warn_once(whole_call_message(layer.name, reason))
        return outputs


def _kinds_of(layer: Any, arguments: Arguments, training: Any) -> list[str]:
    """Return what the losses are that a layer adds, once tried for each kind of call."""
    known = _tried.setdefault(layer, {})
    kind = f"{arguments.kind} {training}"
    if kind not in known:
        try:
            known[kind] = kinds_of_losses(layer, arguments, training)
        except NotByRowsError as error:
            known[kind] = str(error)
    found = known[kind]
    if isinstance(found, str):
        raise NotByRowsError(found)
    return found


def _build(layer: Any, arguments: Arguments) -> None:
    """Create the variables of layers, which cannot be created in a `StatelessScope`."""
    if is_built(layer):
        return
    args, kwargs = arguments.packed(
        [
            keras.KerasTensor(tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for t in arguments.tensors
        ]
    )
    try:
        with inside_of_call.set(True):
            keras.backend.compute_output_spec(layer, *args, **kwargs)
    except Exception as error:  # of the user's code, called in a way that it may not know
        raise NotByRowsError("it is not built, and cannot be without being called") from error


@contextlib.contextmanager
def split_calls(model: Any, rows: int, size: int | None) -> Iterator[None]:
    """Let the outermost calls of layers that this thread makes go by microbatches.

    Args:
        model: the model whose step runs.
        rows: samples of its batch.
        size: samples per microbatch, or None: nothing is split.
    """
    if size is None or rows <= size:
        yield
        return
    heard = heard_layers(model._batch_normalization_layers())
    with _in_front.of(layers_in(model)), heard, _splitting.set(_Splitting(model, rows, size)):
        yield


def _splitting_calls(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def split_call(*args: Any, **kwargs: Any) -> Any:
        splitting = _splitting.get()
        if splitting is None or not splitting.applies(layer):
            return call(*args, **kwargs)
        return splitting.run(layer, call, args, kwargs)

    return split_call


_in_front = InFront("call", _splitting_calls)
