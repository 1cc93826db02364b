"""Patches of a model's optimizers and compiled loss while its step is recorded.

Optimizers pass their gradients to the recording instead of updating, and the compiled loss records
what its terms average over. `CompileLoss.call` matches targets, outputs and sample weights with the
user's losses in many ways, and a custom `compute_loss` may change them before. So losses are
observed where they are computed, in a copy of the compiled loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from ga_model.base._internals import losses_in, set_losses, variables_to_train
from ga_model.base._method_patch import MethodPatch
from ga_model.base._types import Gradient, Nest, Scalar
from ga_model.core.backend_types import Applied
from ga_model.core.losses import StepLosses, observer_of
from ga_model.core.metric_calls import MetricCalls
from ga_model.core.models import recording_of_thread
from ga_model.core.weights import Term

if TYPE_CHECKING:
    from ga_model.core.recorder import Recording


def recorded(name: str, record: Callable[..., Any]) -> MethodPatch:
    """Return a patch for a method of optimizers, active where this thread records a step.

    Args:
        name: name of the method.
        record: replacement; takes the recording, the optimizer, and the method's arguments.
    """

    def make(
        optimizer: keras.optimizers.Optimizer, method: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if (recording := recording_of_thread.get()) is None:
                return method(*args, **kwargs)
            return record(recording, optimizer, *args, **kwargs)

        return run

    return MethodPatch(name, make)


def _scale_loss(
    recording: Recording, optimizer: keras.optimizers.Optimizer, loss: Scalar
) -> Scalar:
    return recording.scale_loss(optimizer, loss)


def _apply(
    recording: Recording,
    optimizer: keras.optimizers.Optimizer,
    grads: Iterable[Gradient],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> None:
    if trainable_variables is None:
        trainable_variables = variables_to_train(optimizer)
    applied = Applied(optimizer, tuple(trainable_variables))
    recording.backend.record_gradients(recording, applied, list(grads))


def _apply_gradients(
    recording: Recording,
    optimizer: keras.optimizers.Optimizer,
    grads_and_vars: Iterable[tuple[Gradient, keras.Variable]],
) -> keras.Variable:
    gradients, variables = zip(*grads_and_vars)
    applied = Applied(optimizer, variables, via_apply_gradients=True)
    recording.backend.record_gradients(recording, applied, list(gradients))
    return optimizer.iterations


SCALE_LOSS = recorded("scale_loss", _scale_loss)
APPLY = recorded("apply", _apply), recorded("apply_gradients", _apply_gradients)


def observed_loss(
    compiled: keras.losses.Loss, losses: StepLosses, calls: MetricCalls
) -> keras.losses.Loss:
    """Return a copy of a compiled loss that records the term of every loss it computes.

    The copy computes as `CompileLoss` does, through observers of the losses. Only the original is
    built; the copy adopts its state.

    Args:
        compiled: the `keras.src.trainers.compile_utils.CompileLoss` of a model.
        losses: losses of the running step.
        calls: metric calls, which receive the terms that metrics track.
    """

    class Observed(type(compiled)):  # type: ignore[misc]
        def build(self, y_true: Nest, y_pred: Nest) -> None:
            compiled.build(y_true, y_pred)
            adopt()

        def call(self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None) -> Scalar:
            terms: list[Term] = []
            self.__dict__["_terms"] = terms
            calls.terms = {id(metric): terms for metric in compiled.metrics}
            loss = super().call(y_true, y_pred, sample_weight)
            if not keras.tree.is_nested(y_true) and not keras.tree.is_nested(y_pred):
                del terms[1:]  # Keras uses the first of several losses of one output
            for term in terms:
                losses.note_term(term)
            return loss

    copy = object.__new__(Observed)

    def adopt() -> None:
        copy.__dict__.update(compiled.__dict__)
        if compiled.built:
            pairs = [(entry, observer_of(entry, copy, losses)) for entry in losses_in(compiled)]
            set_losses(copy, [entry._replace(loss=observer) for entry, observer in pairs])

    adopt()
    return copy
