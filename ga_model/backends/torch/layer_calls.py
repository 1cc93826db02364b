"""Run a step on the full batch, with the outermost calls of layers in it by microbatches.

A call that cannot be split runs whole, and the calls that it makes are then the outermost ones:
always exact, at the cost of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras

from ga_model.backends.torch.call_arguments import Arguments
from ga_model.backends.torch.call_hooks import check_call
from ga_model.backends.torch.call_trial import kinds_of_losses
from ga_model.backends.torch.split_call import SplitCall, UnknownLossError
from ga_model.base._call_again import inside_of_call
from ga_model.base._internals import is_built
from ga_model.recording._splitting import NotByRowsError, Splitting, splitting_by


class _Splitting(Splitting):
    """How the calls of one step are split.

    Args:
        model, size, known, most: as `splitting_calls` takes them.
    """

    def __init__(self, model: Any, size: int, known: dict[Any, Any], most: int | None) -> None:
        super().__init__(model)
        self._size, self._known, self._most = size, known, most

    def _by_microbatches(
        self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, training: Any
    ) -> tuple[Any, tuple[list[str], list[str]]]:
        arguments = Arguments(args, kwargs, self._size, self._most)
        if arguments.rows <= self._size:
            raise NotByRowsError("")
        check_call(layer)
        _build(layer, arguments)
        key = id(layer), arguments.kind, training
        if key not in self._known:
            try:
                self._known[key] = layer, kinds_of_losses(layer, arguments, training)
            except NotByRowsError as error:
                self._known[key] = layer, str(error)
        _, kinds = self._known[key]  # with the layer, whose id no other one gets
        if isinstance(kinds, str):
            raise NotByRowsError(kinds)
        split = SplitCall(layer, arguments, training, kinds)
        try:
            return split.outputs(), split.normalizing
        except UnknownLossError:
            del self._known[key]
            raise


def _build(layer: Any, arguments: Arguments) -> None:
    """Create the variables of layers, which cannot be created in a `StatelessScope`."""
    if is_built(layer):
        return
    args, kwargs = arguments.packed(
        keras.KerasTensor(tuple(t.shape), keras.backend.standardize_dtype(t.dtype))
        for t in arguments.tensors
    )
    try:
        with inside_of_call.set(True):
            keras.backend.compute_output_spec(layer, *args, **kwargs)
    except Exception as error:  # of the user's code, called in a way that it may not know
        raise NotByRowsError("it is not built, and cannot be built without a call") from error


def splitting_calls(
    model: Any, size: int, known: dict[Any, Any], most: int | None = None
) -> AbstractContextManager[None]:
    """Return a context in which the outermost calls of layers go by microbatches.

    Args:
        model: the model whose step runs.
        size: samples per microbatch.
        known: what was found so far, by layers and kinds of calls.
        most: microbatches of each call that are run, or None for all. Outputs and gradients of the
            other samples are then any numbers.
    """
    return splitting_by(model, _Splitting(model, size, known, most))
