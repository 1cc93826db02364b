"""A copy of a compiled loss whose losses are observed.

Keras matches targets, outputs and sample weights with the user's losses in `CompileLoss.call`, in
many ways, and a `compute_loss` of the user's own may change them before. So the losses are listened
to where they are computed, through a copy of the compiled loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from ga_model.base._internals import losses_in, set_losses, set_metrics
from ga_model.recording._stand_ins import StandIn
from ga_model.recording._weights import Term


def copy_with(
    compiled: Any,
    observer: Callable[[Any, Any], Any],
    note: Callable[[Term], None],
    calls: Any,
) -> Any:
    """Return a copy of a compiled loss that notes the term of every loss it computes.

    The copy computes the loss, as `CompileLoss` does, and its losses are observers that pass
    everything on. What `build` makes is the original's own.

    Args:
        compiled: the `keras.src.trainers.compile_utils.CompileLoss` of a model.
        observer: takes an entry of it and the copy; returns what stands in for the entry's loss and
            appends a `Term` to the copy's `_terms`.
        note: called with each term.
        calls: the `MetricCalls` that get the updates of metrics which track one of several losses,
            in their place.
    """

    class Observed(type(compiled)):  # type: ignore[misc]
        def build(self, y_true: Any, y_pred: Any) -> None:
            compiled.build(y_true, y_pred)
            adopt()

        def call(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            terms: list[Term] = []
            self.__dict__["_terms"] = terms
            loss = super().call(y_true, y_pred, sample_weight)
            if not keras.tree.is_nested(y_true) and not keras.tree.is_nested(y_pred):
                del terms[1:]  # of several losses of one output, Keras uses the first
            for term in terms:
                note(term)
            return loss

    copy = object.__new__(Observed)

    def adopt() -> None:
        copy.__dict__.update(compiled.__dict__)
        if compiled.built:
            losses = [entry._replace(loss=observer(entry, copy)) for entry in losses_in(compiled)]
            set_losses(copy, losses)
        copy.__dict__["_calls"] = calls
        set_metrics(copy, [_Tracked(metric, copy) for metric in compiled.metrics])

    adopt()
    return copy


class _Tracked(StandIn):
    """Stands in for the metric that tracks one of several losses.

    It tells the copy of the compiled loss that the metric belongs to.
    """

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        # Keras updates it right after the loss.
        compiled = self._listener
        compiled._calls.update(self._original, value, sample_weight, compiled._terms[-1])

    def result(self) -> Any:
        return self._listener._calls.result(self._original)


def seeing(loss: Any, seen: list[Any]) -> Any:
    """Return a twin of a loss that tells what it computes.

    Args:
        loss: the loss.
        seen: gets its values before they are reduced.
    """
    if not isinstance(loss, keras.losses.Loss):
        return loss

    class Observed(type(loss)):  # type: ignore[misc]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            values = super().call(y_true, y_pred)
            # A number, perhaps. Ragged tensors would be refused.
            is_tensor = keras.ops.is_tensor(values)
            seen.append(values if is_tensor else keras.ops.convert_to_tensor(values))
            return seen[-1]

    twin = object.__new__(Observed)
    object.__setattr__(twin, "__dict__", loss.__dict__)  # one state, whatever `call` does to it
    return twin


def same_rank(a: Any, b: Any) -> tuple[Any, Any]:
    """Give the mask (rows, positions) and sample weights of rank one or two the same rank."""
    if len(a.shape) == len(b.shape) + 1 and a.shape[-1] == 1:
        return (a, b[:, None]) if len(b.shape) == 1 else (keras.ops.squeeze(a, -1), b)
    if len(b.shape) == len(a.shape) + 1 and b.shape[-1] == 1:
        return (a[:, None], b) if len(a.shape) == 1 else (a, keras.ops.squeeze(b, -1))
    return a, b
