"""Run a step on the full batch, and split its calls of layers into microbatches.

The step of a model runs once, as it is, on the full batch. What it does with the outputs of layers
(losses, metrics, updates, in any order and number) is its own. Only the outermost calls of layers
in it are another matter: while the step runs, an attribute of each layer stands in front of its
class's `call`, and lets a call with the samples of the batch go by microbatches (`_split_call`).

A call that cannot be split runs whole, and the calls that it makes are then the outermost ones.
That is always exact; what it costs is memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ga_model.base._call_again import inside_of_call
from ga_model.base._context import ThreadValue, graph_being_made
from ga_model.base._in_front import InFront
from ga_model.base._internals import layers_in
from ga_model.calls._call_arguments import Arguments
from ga_model.calls._microbatch_call import MicrobatchCall
from ga_model.calls._split_call import SplitCall, Turns
from ga_model.hearing._splitting import NotByRowsError, Splitting
from ga_model.recording._normalization import heard_layers
from ga_model.recording._recorder import note_call

_splitting = ThreadValue()  # how calls are split in this thread, or None


class _Splitting(Splitting):
    """How the calls of one step are split.

    Args:
        model: the model whose step runs.
        rows: int64 scalar tensor, the samples of the batch.
        size: samples per microbatch.
        limit: how many microbatches of a call really run, or None: outputs of the others are made
            up.
    """

    def __init__(self, model: Any, rows: Any, size: Any, limit: int | None) -> None:
        super().__init__(model)
        self._rows = rows
        self._size = size
        self._limit = limit
        self._graph = graph_being_made()
        self._turns = Turns()

    def is_outermost_graph(self) -> bool:
        """Return whether this is the step's own graph, and no branch, loop or function in it."""
        return graph_being_made() is self._graph

    def run_in_inner_graph(
        self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Make a call whole, with all calls in it."""
        if not self._is_in_whole_call.get():
            self._model._warn_once(_inner_call_message(layer.name))
        with inside_of_call.set(True):
            return call(*args, **kwargs)

    def _by_microbatches(
        self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, training: Any
    ) -> tuple[Any, tuple[list[str], list[str]]]:
        try:
            arguments = Arguments(args, kwargs, self._rows, self._size)
        except NotByRowsError:
            raise
        except Exception as error:  # of a graph that is not what it is taken for
            raise NotByRowsError("it is unclear which of its inputs have a batch axis") from error
        jit_compile = bool(self._model.jit_compile)
        on_microbatch = MicrobatchCall(layer, call, arguments, training, jit_compile, self._limit)
        split = SplitCall(on_microbatch, self._turns)
        outputs = split.outputs()
        note_call(outputs)
        return outputs, split.normalizing


@contextlib.contextmanager
def split_calls(model: Any, rows: Any, size: Any, limit: int | None = None) -> Iterator[None]:
    """Let the outermost calls of layers that this thread makes go by microbatches.

    Args:
        model: the model whose step runs.
        rows: samples of its batch: int64 scalar tensor.
        size: samples per microbatch.
        limit: how many microbatches of a call really run, or None: outputs of the others are made
            up, for a trial of memory.
    """
    layers = layers_in(model)
    splitting = _Splitting(model, rows, size, limit)
    with _in_front.of(layers), heard_layers(model), _splitting.set(splitting):
        yield
        splitting.end()


def _splitting_calls(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def split_call(*args: Any, **kwargs: Any) -> Any:
        splitting = _splitting.get()
        if splitting is None or not splitting.applies(layer):
            return call(*args, **kwargs)
        run = splitting.run if splitting.is_outermost_graph() else splitting.run_in_inner_graph
        return run(layer, call, args, kwargs)

    return split_call


_in_front = InFront("call", _splitting_calls)


def _inner_call_message(layer: str) -> str:
    return (
        f"A call of {layer!r} takes the memory of the full batch, because `train_step` makes it "
        "inside `tf.cond`, a loop, or a nested `tf.function`. Training is exact. To save the "
        "memory, move the call out."
    )
