"""Run a step on the full batch, and split its calls of layers into microbatches.

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
from ga_model.base._internals import is_built, layers_in
from ga_model.hearing._moments_heard import telling
from ga_model.hearing._splitting import NotByRowsError, Splitting
from ga_model.torch_engine._gradient_hooks import check_call
from ga_model.torch_engine._not_known import otherwise
from ga_model.torch_engine._torch_arguments import Arguments
from ga_model.torch_engine._torch_call_checks import kinds_of_losses
from ga_model.torch_engine._torch_split_call import SplitCall

_Found = list[str | None] | str
_splitting = ThreadValue()  # how calls are split in this thread, or None

# Of each layer, what is known of the kinds of calls that were tried: what the losses are that it
# adds, or why it cannot be split.
_tried: weakref.WeakKeyDictionary[Any, dict[str, _Found]] = weakref.WeakKeyDictionary()


class _Splitting(Splitting):
    """How the calls of one step are split.

    Args:
        model: the model whose step runs.
        rows: samples of its batch.
        size: samples per microbatch.
        most: microbatches of each call that are run, or None for all.
    """

    def __init__(self, model: Any, rows: int, size: int, most: int | None) -> None:
        super().__init__(model)
        self._most = most
        self._rows = rows
        self._size = size

    def _by_microbatches(
        self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, training: Any
    ) -> tuple[Any, tuple[list[str], list[str]]]:
        arguments = Arguments(args, kwargs, self._rows, self._size, self._most)
        if len(arguments.shares()) == 1:
            raise NotByRowsError("")
        check_call(layer)
        _build(layer, arguments)
        kinds = _kinds_of(layer, arguments, training)
        split = _split_call(layer, arguments, training, kinds)
        if split is None:
            raise NotByRowsError("what it holds is not known")
        return split.outputs(), split.normalizing


_split_call = otherwise(None)(SplitCall)


def _kinds_of(layer: Any, arguments: Arguments, training: Any) -> list[str | None]:
    """Return what the losses are that a layer adds, tried for each kind of call until they tell."""
    known = _tried.setdefault(layer, {})
    kind = f"{arguments.kind} {training}"
    found = known.get(kind)
    if found is None or (not isinstance(found, str) and None in found):
        try:
            known[kind] = kinds_of_losses(layer, arguments, training)
        except NotByRowsError as error:
            if not str(error):  # which the next call may answer
                raise
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
        raise NotByRowsError("it is not built, and cannot be built without a call") from error


@contextlib.contextmanager
def split_calls(model: Any, rows: int, size: int | None, most: int | None = None) -> Iterator[None]:
    """Let the outermost calls of layers that this thread makes go by microbatches.

    Args:
        model: the model whose step runs.
        rows: samples of its batch.
        size: samples per microbatch, or None: nothing is split.
        most: microbatches of each call that are run, or None for all. Outputs and gradients of the
            other samples are then any numbers.
    """
    if size is None or rows <= size:
        yield
        return
    heard = telling(model._batch_normalization_layers())
    splitting = _Splitting(model, rows, size, most)
    with _in_front.of(layers_in(model)), heard, _splitting.set(splitting):
        yield
        splitting.end()


def _splitting_calls(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def split_call(*args: Any, **kwargs: Any) -> Any:
        splitting = _splitting.get()
        if splitting is None or not splitting.applies(layer):
            return call(*args, **kwargs)
        return splitting.run(layer, call, args, kwargs)

    return split_call


_in_front = InFront("call", _splitting_calls)
