"""The logs of a batch that ran in microbatches.

As on TensorFlow: scalars that go into a `keras.metrics.Mean` wait for the full batch, which has one
value where its microbatches have one each. Of other metrics the updates add up as they are. Numbers
that a step returns are combined with the same weights, and what a metric gave is asked of it again.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import torch

from ga_model.base._identity import is_in
from ga_model.base._internals import loss_tracker
from ga_model.hearing._metric_calls import MetricCall


class _Mean:
    """A mean over the microbatches of a batch."""

    def __init__(self) -> None:
        self._numerator: Any = 0.0
        self._denominator = 0.0
        self._num_added = 0

    def add(self, numerator: Any, denominator: float) -> None:
        if torch.is_tensor(numerator):
            numerator = numerator.detach()
            if numerator.device.type != "mps":  # which has no float64
                numerator = numerator.double()
        self._numerator = self._numerator + numerator
        self._denominator += denominator
        self._num_added += 1

    def value(self) -> Any:
        return self._numerator / self._denominator if self._denominator else 0.0

    def is_empty(self) -> bool:
        """Return whether no microbatch has counted."""
        return self._num_added == 0


class BatchLogs:
    """The logs and metric updates of a batch, put together from those of its microbatches.

    Args:
        model: the `AccumulatingModel`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._updates: list[MetricCall] = []
        self._means: dict[Any, _Mean] = {}  # of updates by their number, of logs by their place
        self._weights: dict[int, Any] = {}  # of updates
        self._sources: dict[int, tuple[Any, str | None]] = {}  # metrics, by the place of logs
        self._watched: list[Any] = []
        self._logs: Any = None
        self._names: set[str] | None = None  # of metrics that have no stand-in

    def add(self, recording: Any, logs: Any, counts: bool) -> None:
        """Add what one microbatch logged, while its recording is there.

        Args:
            recording: the recording.
            logs: what the step returned.
            counts: whether the microbatch is not left out.
        """
        metrics, rows = recording.metrics, recording.losses.num_rows()
        self._watched = list(metrics.watched)
        self._updates = [call._replace(value=None, term=None) for call in metrics.updates]
        self._logs = logs
        if self._names is None:
            self._names = set(self._results_by_name()) if isinstance(logs, dict) else set()
        with torch.no_grad():
            for number, (metric, value, sample_weight, term) in enumerate(metrics.updates):
                mean = self._means.setdefault(("update", number), _Mean())
                if counts:
                    mean.add(*recording.mean_of(value, metric, term))
                is_rows = metric is loss_tracker(self._model) or term is not None
                if is_rows or torch.is_tensor(sample_weight) or sample_weight == rows:
                    weight = rows if is_rows else sample_weight
                    self._weights[number] = self._weights.get(number, 0) + weight * counts
                else:
                    self._weights[number] = 1.0 if sample_weight is None else sample_weight
            for place, (key, leaf) in enumerate(self._leaves()):
                if key in self._names:
                    continue
                source = [(m, k) for result, m, k in metrics.results if result is leaf]
                if source:
                    self._sources[place] = source[0]
                elif _is_number(leaf):
                    mean = self._means.setdefault(place, _Mean())
                    if counts:
                        mean.add(*recording.mean_of(leaf))

    def finish(self) -> Any:
        """Update the metrics, and return the logs of the batch."""
        for number, call in enumerate(self._updates):
            mean = self._means["update", number]
            weight = 0.0 if mean.is_empty() else self._weights[number]
            call.metric.update_state(mean.value(), sample_weight=weight)
        results = self._results_by_name()
        values = []
        for place, (key, leaf) in enumerate(self._leaves()):
            if isinstance(self._logs, dict) and key in results:
                values.append(results[key])
            elif place in self._sources:
                metric, name = self._sources[place]
                values.append(metric.result() if name is None else metric.result()[name])
            elif place in self._means:
                value = math.nan if self._means[place].is_empty() else self._means[place].value()
                dtype = getattr(leaf, "dtype", None)
                values.append(value.to(dtype) if dtype and not isinstance(value, float) else value)
            else:
                values.append(leaf)
        logs = keras.tree.pack_sequence_as(self._logs, values)
        return {key: logs[key] for key in self._logs} if isinstance(logs, dict) else logs

    def _leaves(self) -> list[tuple[Any, Any]]:
        """Return the logs in their order, each with the name that it has in a dict of them."""
        if not isinstance(self._logs, dict):
            return [(None, leaf) for leaf in keras.tree.flatten(self._logs)]
        paths = keras.tree.flatten_with_path(self._logs)
        return [(path[0] if len(path) == 1 else None, leaf) for path, leaf in paths]

    def _results_by_name(self) -> dict[str, Any]:
        """Return what metrics give that have no stand-in, by the names they have in Keras's logs.

        They are those of layers, and others that the model keeps in no attribute.
        """
        watched = [*self._watched, loss_tracker(self._model)]
        results: dict[str, Any] = {}
        for metric in self._model.metrics:
            # Compiled metrics that a custom step does not use are not built.
            if getattr(metric, "built", True) and not is_in(metric, watched):
                result = metric.result()
                results.update(result if isinstance(result, dict) else {metric.name: result})
        return results


def _is_number(leaf: Any) -> bool:
    """Return whether a log can be averaged."""
    return isinstance(leaf, float) or (torch.is_tensor(leaf) and leaf.is_floating_point())
