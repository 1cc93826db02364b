"""Metrics that wait for the full batch, while one of its microbatches is recorded."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras

from ga_model.hearing._stand_in import StandIn


class MetricCall(NamedTuple):
    """An update of a metric, and the loss term that its value is of, or None."""

    metric: Any
    value: Any
    sample_weight: Any
    term: Any


class MetricCalls:
    """What metrics got and gave while one microbatch was recorded.

    Args:
        tracker: Keras's own metric for the loss.

    Attributes:
        updates: updates that wait for the full batch.
        watched: metrics that the step used through stand-ins.
        results: tensors that metrics gave, with the metric, and the key if it gave a dict.
        has_late_updates: whether an update that waits came after a result of its metric.
    """

    def __init__(self, tracker: Any = None) -> None:
        self._tracker = tracker
        self.updates: list[MetricCall] = []
        self.watched: list[Any] = []
        self.results: list[tuple[Any, Any, str | None]] = []
        self.has_late_updates = False

    def waits_for(self, metric: Any, value: Any, sample_weight: Any) -> bool:
        """Return whether an update of a `Mean` has to wait for the full batch.

        Rows do not, and neither does a scalar with a weight of its own, because they add up over
        microbatches; Keras's loss tracker does, whose weight is the rows whatever the loss is.
        """
        if metric is not self._tracker and keras.ops.is_tensor(sample_weight):
            return False
        return _is_scalar(value) and _is_scalar(sample_weight)

    def update(self, metric: Any, value: Any, sample_weight: Any, term: Any = None) -> None:
        """Let an update wait. `term` is the loss term that `value` is of, if it is one's."""
        self.has_late_updates |= any(metric is other for _, other, _ in self.results)
        self.watched.append(metric)
        self.updates.append(MetricCall(metric, value, sample_weight, term))

    def result(self, metric: Any) -> Any:
        """Return the metric's result, and remember that it is that."""
        self.watched.append(metric)
        result = metric.result()
        by_key = result if isinstance(result, dict) else {None: result}
        self.results += [(value, metric, key) for key, value in by_key.items()]
        return result


class MetricStandIn(StandIn):
    """Stands in for a metric in an attribute of the model during one recorded step.

    It tells the `MetricCalls`.
    """

    def update_state(self, *args: Any, **kwargs: Any) -> Any:
        if type(self._original).update_state is keras.metrics.Mean.update_state:
            value, sample_weight = _mean_arguments(*args, **kwargs)
            if self._listener.waits_for(self._original, value, sample_weight):
                value = keras.ops.convert_to_tensor(value)
                self._listener.update(self._original, value, sample_weight)
                return None
        self._listener.watched.append(self._original)
        return self._original.update_state(*args, **kwargs)

    def result(self) -> Any:
        return self._listener.result(self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.update_state(*args, **kwargs)
        return self.result()


def _mean_arguments(values: Any, sample_weight: Any = None) -> tuple[Any, Any]:
    return values, sample_weight


def _is_scalar(value: Any) -> bool:
    return value is None or keras.ops.ndim(value) == 0
