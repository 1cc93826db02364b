"""Split layer calls into microbatches while a step runs on a full batch.

The step runs once, unchanged. A patch of the `call` of each layer runs the outermost calls on
samples of the batch by microbatches. A call that may combine samples runs on the full batch, and
the calls that it makes become the outermost ones: always exact, at the cost of memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from ga_model.base._context import ThreadValue
from ga_model.base._identity import is_in
from ga_model.base._internals import (
    is_built,
    is_rematerialized,
    is_symbolic,
    layers_in,
    training_of_call,
)
from ga_model.base._method_patch import MethodPatch
from ga_model.base._python_state import inside_split_call
from ga_model.base._types import Nest, Tensor
from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.layer_calls import LayerCall
from ga_model.core.proof.calls import KNOWN, NotByRowsError
from ga_model.core.proof.samples import samples_for_trial
from ga_model.core.statistics import is_known, passing_moments

_splitting = ThreadValue()  # the `_Splitting` of the step of this thread, or None


class _Splitting:
    """How to split the layer calls of one step.

    Args:
        model: the model whose step runs.
        backend: the backend of the model.
        data, size, most: see `splitting_calls`.
    """

    def __init__(
        self, model: keras.Model, backend: Backend, data: Nest, size: int, most: int | None
    ) -> None:
        self._model, self._backend, self._place = model, backend, backend.current_graph()
        self._data = data
        self._size, self._most = size, most
        self._is_in_whole_call = ThreadValue(False)
        self._has_seen_call = False  # one that could be split

    def applies(self, layer: keras.Layer) -> bool:
        """Return whether to split a call of a layer that runs here."""
        if inside_split_call.get() or is_symbolic():
            return False
        # Skip calls in a branch, or in a function that the step compiles.
        if self._backend.current_graph() is not self._place or not self._backend.is_in_step():
            return False
        # Layers without weights draw random numbers or are cheap.
        has_weights = bool(layer.weights or not is_built(layer))
        self._has_seen_call = self._has_seen_call or has_weights
        return has_weights and not any(map(is_rematerialized, layers_in(layer)))

    def end(self) -> None:
        """Warn at the end of a step that had no call to split."""
        if not self._has_seen_call:
            self._model._warn_once(messages.unsplit_step_message(self._model.name))

    def run(
        self,
        layer: keras.Layer,
        call: Callable[..., Nest],
        args: tuple[Nest, ...],
        kwargs: dict[str, Nest],
    ) -> Nest:
        """Run a call by microbatches, or on the full batch if it cannot be split."""
        training = kwargs.get("training", training_of_call(layer))
        try:
            return self._by_microbatches(layer, call, args, kwargs, training)
        except NotByRowsError as error:
            reason = str(error)
        with self._is_in_whole_call.set(True):
            outputs = call(*args, **kwargs)
        if reason and not self._is_in_whole_call.get():
            # Warn of the first reason for a layer only: others may differ by shapes.
            _, reason = self._backend.known_calls.setdefault(id(layer), (layer, reason))
            self._model._warn_once(messages.whole_call_message(layer.name, reason))
        return outputs

    def _by_microbatches(
        self,
        layer: keras.Layer,
        call: Callable[..., Nest],
        args: tuple[Nest, ...],
        kwargs: dict[str, Nest],
        training: bool | None,
    ) -> Nest:
        layer_call = LayerCall(
            self._backend, layer, call, args, kwargs, self._size, self._samples_of
        )
        reason = layer_call.analyze(training)
        if reason is None and None in layer_call.kinds:
            reason = "it adds a loss that is neither a mean nor a sum over samples"
        if reason is None and "zero" in layer_call.kinds:
            reason = "it adds a loss that was zero when it was tried: a mean over samples, or a sum"
        if reason is None and (written := layer_call.written()):
            reason = f"it writes to {written} in each call"
        if reason is not None:
            raise NotByRowsError(reason)
        outputs = layer_call.by_microbatches(self._most)
        trained = self._model._batch_normalization_layers() if training is True else []
        trained = [part for part in layers_in(layer) if is_in(part, trained)]
        pooled = [part.name for part in trained if is_known(part)]
        unpooled = [part.name for part in trained if not is_known(part)]
        for message in messages.batch_normalization_messages(pooled, unpooled):
            self._model._warn_once(message)
        return outputs

    def _samples_of(self, array: Tensor) -> np.ndarray | None:
        """Return trial samples of an array of the batch, or None for any other array."""
        leaves = keras.tree.flatten(self._data)
        index = next((index for index, leaf in enumerate(leaves) if leaf is array), None)
        if index is None or len(self._samples) != len(leaves):
            return None
        samples = self._samples[index]
        return samples if isinstance(samples, np.ndarray) else None

    @functools.cached_property
    def _samples(self) -> list[Any]:
        """Trial samples from the batch that is being trained."""
        data = self._backend.samples_of(self._backend.current_batch)
        try:
            return list(keras.tree.flatten(next(samples_for_trial(data, KNOWN))))
        except ValueError:  # ragged data
            return []


def _split_call(layer: keras.Layer, call: Callable[..., Nest]) -> Callable[..., Nest]:
    def run(*args: Any, **kwargs: Any) -> Nest:
        splitting = _splitting.get()
        if splitting is None or not splitting.applies(layer):
            return call(*args, **kwargs)
        return splitting.run(layer, call, args, kwargs)

    return run


_calls_of_layers = MethodPatch("call", _split_call)


@contextlib.contextmanager
def splitting_calls(
    model: keras.Model, backend: Backend, data: Nest, size: int, most: int | None = None
) -> Iterator[None]:
    """Return a context in which the outermost layer calls run by microbatches.

    Args:
        model: the model whose step runs.
        backend: the backend of the model.
        data: the batch, as the step gets it.
        size: samples per microbatch.
        most: microbatches to run per call, or None for all. Outputs for other samples are
            arbitrary.
    """
    splitting = _Splitting(model, backend, data, size, most)
    moments = passing_moments(model._batch_normalization_layers())
    with _calls_of_layers.of(layers_in(model)), moments, _splitting.set(splitting):
        yield
        splitting.end()
