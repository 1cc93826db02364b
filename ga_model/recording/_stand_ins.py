"""What stands in for the attributes of a model while a step of it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ga_model.base._internals import variables_to_train
from ga_model.recording._metric_calls import MetricCalls
from ga_model.recording._models import is_recorded


class StandIn:
    """Passes everything on to an object. Subclasses define what they answer themselves.

    Args:
        original: the object.
        listener: the object that a subclass notifies.
    """

    _original: Any
    _listener: Any

    def __init__(self, original: Any, listener: Any) -> None:
        object.__setattr__(self, "_original", original)
        object.__setattr__(self, "_listener", listener)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance(model.optimizer, keras.optimizers.Adam) holds
        return type(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)


class OptimizerStandIn(StandIn):
    """Stands in for one optimizer during one recorded step. It tells the recording."""

    def scale_loss(self, loss: Any) -> Any:
        return self._listener.scale_loss(self._original, loss)

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
        self._listener.apply(
            self._original, gradients, variables, via_apply_gradients=via_apply_gradients
        )


class MetricStandIn(StandIn):
    """Stands in for a metric in an attribute of the model during one recorded step.

    It tells the `MetricCalls`.
    """

    def result(self) -> Any:
        return self._listener.result(self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.update_state(*args, **kwargs)
        return self.result()


def stand_in(
    value: Any, recording: Any, metrics: MetricCalls, of_optimizer: type[OptimizerStandIn]
) -> Any:
    """Return an attribute's value with stand-ins for what has one, also in lists and dicts.

    Args:
        value: the value.
        recording: what the stand-ins of optimizers tell.
        metrics: what those of metrics tell.
        of_optimizer: the class of stand-ins of optimizers.
    """

    def of(part: Any) -> Any:
        return stand_in(part, recording, metrics, of_optimizer)

    if not is_recorded(value):
        return value
    if isinstance(value, dict):
        return {key: of(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = map(of, value)
        return type(value)(*parts) if hasattr(value, "_fields") else list(parts)
    if isinstance(value, keras.optimizers.Optimizer):
        return of_optimizer(value, recording)
    return MetricStandIn(value, metrics)


def original_of(value: Any) -> Any:
    """Return what a stand-in stands for, or the value itself if it is none."""
    return vars(value)["_original"] if isinstance(value, StandIn) else value
