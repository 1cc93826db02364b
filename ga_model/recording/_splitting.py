"""Which calls of layers go by microbatches while a step runs on a full batch, on every backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ga_model.base._call_again import inside_of_call
from ga_model.base._context import ThreadValue
from ga_model.base._internals import (
    is_built,
    is_rematerialized,
    is_symbolic,
    layers_in,
    stateless_scope,
    training_of_call,
)
from ga_model.base._messages import batch_normalization_messages
from ga_model.base._method_patch import MethodPatch
from ga_model.recording._messages import unheard_calls_message, whole_call_message
from ga_model.recording._moments_heard import telling

_splitting = ThreadValue()  # how calls are split in this thread, or None


class NotByRowsError(Exception):
    """A call cannot be made on some samples at a time. The text says why."""


class Splitting:
    """How the calls of one step are split.

    Args:
        model: the model whose step runs.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._scope = stateless_scope()
        self._is_in_whole_call = ThreadValue(False)
        self._has_heard = False  # a call that could be split

    def applies(self, layer: Any) -> bool:
        """Return whether a call of a layer that runs here is to be split."""
        if inside_of_call.get() or is_symbolic():
            return False
        if stateless_scope() is not self._scope:
            return False  # weights are what the step says
        # A layer without weights draws random numbers, or computes little.
        has_weights = bool(layer.weights or not is_built(layer))
        self._has_heard = self._has_heard or has_weights
        return has_weights and not any(map(is_rematerialized, layers_in(layer)))

    def end(self) -> None:
        """Tell of a step, at its end, in which no call was heard that could be split."""
        if not self._has_heard:
            self._model._warn_once(unheard_calls_message(self._model.name))

    def run(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call by microbatches, or whole where it cannot be split."""
        training = kwargs.get("training", training_of_call(layer))
        try:
            outputs, normalizing = self._by_microbatches(layer, call, args, kwargs, training)
            for message in batch_normalization_messages(*normalizing):
                self._model._warn_once(message)
            return outputs
        except NotByRowsError as error:
            reason = str(error)
        with self._is_in_whole_call.set(True):
            outputs = call(*args, **kwargs)
        if reason and not self._is_in_whole_call.get():
            self._model._warn_once(whole_call_message(layer.name, reason))
        return outputs

    def _by_microbatches(
        self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, training: Any
    ) -> tuple[Any, tuple[list[str], list[str]]]:
        """Make a call by microbatches.

        Returns:
            What it gives, and the names of BatchNormalization layers that have normalized
            microbatches: those whose running averages move by all samples, and others.

        Raises:
            NotByRowsError: it cannot be split.
        """
        raise NotImplementedError


def _heard(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def heard(*args: Any, **kwargs: Any) -> Any:
        splitting = _splitting.get()
        if splitting is None or not splitting.applies(layer):
            return call(*args, **kwargs)
        return splitting.run(layer, call, args, kwargs)

    return heard


_calls_of_layers = MethodPatch("call", _heard)


@contextlib.contextmanager
def splitting_by(model: Any, splitting: Splitting) -> Iterator[None]:
    """Split the outermost calls of a model's layers that this thread makes in a block."""
    heard = telling(model._batch_normalization_layers())
    with _calls_of_layers.of(layers_in(model)), heard, _splitting.set(splitting):
        yield
        splitting.end()
