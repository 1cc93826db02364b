"""Stand-ins for attributes of a model while its step is recorded.

Optimizers return gradients instead of updating, and the compiled loss
notes what its terms average over. Keras matches targets, outputs and sample weights with the user's
losses in `CompileLoss.call`, in many ways, and a `compute_loss` of the user's own may change them
before: so losses are observed where they are computed, in a copy of the compiled loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras

from ga_model.base._internals import losses_in, set_losses, set_metrics, variables_to_train
from ga_model.core.losses import StepLosses, observer_of
from ga_model.core.metric_calls import MetricCalls
from ga_model.core.models import current_recording, optimizers_in
from ga_model.core.weights import Term

_MISSING = object()


class RecordedAttribute:
    """Data descriptor of a model's attribute that answers with a stand-in while it is recorded.

    The value stays under the attribute's name in the instance's `__dict__`, where Keras's saving
    finds it.

    Args:
        name: the attribute's name.
        default: what the class has under that name, if anything.
    """

    def __init__(self, name: str, default: Any = _MISSING) -> None:
        self._name = name
        self._default = default

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None:
            return self
        value = model.__dict__.get(self._name, self._default)
        if value is _MISSING:
            raise AttributeError(f"{type(model).__name__!r} object has no attribute {self._name!r}")
        recording = current_recording(model)
        return value if recording is None else self._stand_in(recording, value)

    def _stand_in(self, recording: Any, value: Any) -> Any:
        return stand_in(value, recording)

    def __set__(self, model: Any, value: Any) -> None:
        model.__dict__[self._name] = value

    def __delete__(self, model: Any) -> None:
        del model.__dict__[self._name]


class CompiledLossAttribute(RecordedAttribute):
    """The attribute where Keras keeps the compiled loss."""

    def _stand_in(self, recording: Any, value: Any) -> Any:
        return value if value is None else recording.observed_loss(value)


def watch_attributes(model: Any) -> None:
    """Make every attribute that holds optimizers a `RecordedAttribute` of the model's class."""
    for name in [name for name, value in vars(model).items() if optimizers_in(value)]:
        present = inspect.getattr_static(type(model), name, _MISSING)
        if not hasattr(present, "__get__"):
            setattr(type(model), name, RecordedAttribute(name, present))


class StandIn:
    """Passes everything on to an object. Subclasses define what they answer themselves.

    Args:
        recorder: the object that a subclass passes calls to.
    """

    _original: Any
    _recorder: Any

    def __init__(self, original: Any, recorder: Any) -> None:
        object.__setattr__(self, "_original", original)
        object.__setattr__(self, "_recorder", recorder)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance(model.optimizer, keras.optimizers.Adam) holds
        return type(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)


class OptimizerStandIn(StandIn):
    """Stands in for one optimizer during one recorded step, and passes calls to the recording."""

    def scale_loss(self, loss: Any) -> Any:
        return self._recorder.scale_loss(self._original, loss)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if trainable_variables is None:
            trainable_variables = variables_to_train(self._original)
        self._take(list(grads), list(trainable_variables))

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        gradients, variables = zip(*grads_and_vars)
        self._take(list(gradients), list(variables), via_apply_gradients=True)
        return self._original.iterations

    def _take(
        self, gradients: list[Any], variables: list[Any], via_apply_gradients: bool = False
    ) -> None:
        self._recorder.apply(
            self._original, gradients, variables, via_apply_gradients=via_apply_gradients
        )


def stand_in(value: Any, recording: Any) -> Any:
    """Return an attribute's value with stand-ins for optimizers, also in lists and dicts.

    Args:
        recording: what the stand-ins pass calls to.
    """
    if not optimizers_in(value):
        return value
    if isinstance(value, dict):
        return {key: stand_in(part, recording) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [stand_in(part, recording) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else parts
    return recording.backend.optimizer_stand_in(value, recording)


def observed_loss(compiled: Any, losses: StepLosses, calls: MetricCalls) -> Any:
    """Return a copy of a compiled loss that notes the term of every loss it computes.

    The copy computes the loss, as `CompileLoss` does, and its losses are observers that pass
    everything on. What `build` makes is the original's own.

    Args:
        compiled: the `keras.src.trainers.compile_utils.CompileLoss` of a model.
        losses: of the step that runs.
        calls: get the updates of metrics which track one of several losses, in their place.
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
                losses.note_term(term)
            return loss

    copy = object.__new__(Observed)

    def adopt() -> None:
        copy.__dict__.update(compiled.__dict__)
        if compiled.built:
            pairs = [(entry, observer_of(entry, copy, losses)) for entry in losses_in(compiled)]
            set_losses(copy, [entry._replace(loss=observer) for entry, observer in pairs])
        copy.__dict__["_calls"] = calls
        set_metrics(copy, [_Tracked(metric, copy) for metric in compiled.metrics])

    adopt()
    return copy


class _Tracked(StandIn):
    """Stands in for the metric that tracks one of several losses.

    Its updates go to the copy of the compiled loss that the metric belongs to.
    """

    def update_state(self, value: Any, sample_weight: Any = None) -> None:
        # Keras updates it right after the loss.
        compiled = self._recorder
        compiled._calls.update(self._original, value, sample_weight, compiled._terms[-1])

    def result(self) -> Any:
        return self._recorder._calls.note_result(self._original, self._original.result())
