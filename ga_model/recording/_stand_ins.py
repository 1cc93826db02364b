"""What stands in for the attributes of a model while a step of it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ga_model.base._internals import variables_to_train
from ga_model.recording._metric_calls import MetricCalls, MetricStandIn
from ga_model.recording._models import is_recorded
from ga_model.recording._stand_in import StandIn


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


def stand_in(
    value: Any,
    recording: Any,
    metrics: MetricCalls | None,
    of_optimizer: type[OptimizerStandIn] = OptimizerStandIn,
) -> Any:
    """Return an attribute's value with stand-ins for what has one, also in lists and dicts.

    Args:
        value: the value.
        recording: what the stand-ins of optimizers tell.
        metrics: what those of metrics tell, or None: metrics answer themselves.
        of_optimizer: the class of stand-ins of optimizers.
    """
    if not is_recorded(value):
        return value
    if isinstance(value, dict):
        parts = [stand_in(part, recording, metrics, of_optimizer) for part in value.values()]
        return dict(zip(value, parts))
    if isinstance(value, (list, tuple)):
        parts = [stand_in(part, recording, metrics, of_optimizer) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else parts
    if isinstance(value, keras.optimizers.Optimizer):
        return of_optimizer(value, recording)
    return value if metrics is None else MetricStandIn(value, metrics)
