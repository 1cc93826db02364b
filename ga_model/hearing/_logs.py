"""The logs of a batch that ran in microbatches.

A metric that sees targets and predictions sees every row once, whatever the microbatches are. What
a step tracks of the loss is another matter: there is one value per microbatch, where the whole
batch has one, and microbatches count differently. So scalars that go into a `keras.metrics.Mean`
wait, and the metric gets one value per batch, sum_i(w_i * value_i) / sum_i(w_i) with the weights of
`_weights`, which for the loss is the loss of the full batch. The logs that a step returns are read
when all microbatches are through: what a metric gave is asked from the metric again, other numbers
are combined with the same weights, and of anything else the last microbatch's stands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.base._context import graph_being_made
from ga_model.base._internals import loss_tracker
from ga_model.hearing import _metric_calls
from ga_model.replicas import _strategy


class Mean(NamedTuple):
    """A microbatch's part of a mean over the batch: both are summed over microbatches."""

    numerator: Any
    denominator: Any


class MetricCalls(_metric_calls.MetricCalls):
    """What metrics got and gave. In an inner graph, a branch of `tf.cond` say, none waits."""

    def __init__(self, tracker: Any = None) -> None:
        super().__init__(tracker)
        self._graph = graph_being_made()

    def waits_for(self, metric: Any, value: Any, sample_weight: Any) -> bool:
        is_here = self._graph in (None, graph_being_made())
        return is_here and super().waits_for(metric, value, sample_weight)


class BatchLogs:
    """The logs and metric updates of a batch, put together from those of its microbatches.

    Args:
        recording: the `Recording` of one of the microbatches.
        logs: what the step returned for it.

    Attributes:
        sums: float64 tensors that are to be summed over the microbatches.
        last: tensors of which the last microbatch's are to be kept.
        names: of metrics that the step used past their stand-ins.
    """

    def __init__(self, recording: Any, logs: Any) -> None:
        self.sums: list[Any] = []
        self.last: list[Any] = []
        self._model = recording.model
        self._logs = logs
        self._updates = recording.metrics.updates
        self._results = recording.metrics.results
        self._watched = recording.metrics.watched
        self.names = set(self._results_by_name()) if isinstance(logs, dict) else set()
        for metric, value, sample_weight, term in self._updates:
            self.sums += recording.mean_of(value, metric, term)
            if tf.is_tensor(sample_weight) and term is None:
                self.sums.append(tf.cast(sample_weight, tf.float64))
        for leaf in self.others():
            if _is_number(leaf):
                self.sums += recording.mean_of(leaf)
            elif leaf is not None:
                self.last.append(tf.convert_to_tensor(leaf))

    def finish(self, sums: list[Any], last: list[Any], rows: int | None, num_counted: Any) -> Any:
        """Update the metrics, and return the logs of the batch.

        Args:
            sums, last: what the attributes have come to.
            rows: rows of the batch where they are known without running the graph.
            num_counted: int64 scalar tensor, microbatches that were not left out. With none,
                metrics stay as they are, and numbers are NaN.
        """
        num_counted = tf.cast(num_counted, tf.float64)
        counts_here = tf.cast(tf.greater(num_counted, 0), tf.float64)
        *sums, num_counted = _strategy.mean_over_replicas([*sums, num_counted])
        counts, last = tf.cast(tf.greater(num_counted, 0), tf.float64), list(last)

        def mean() -> tf.Tensor:
            return tf.math.divide_no_nan(sums.pop(0), sums.pop(0))

        for metric, value, sample_weight, term in self._updates:
            value = tf.cast(mean(), value.dtype)
            if term is not None:
                sample_weight = rows  # as Keras counts the outputs' losses
            elif tf.is_tensor(sample_weight):
                sample_weight = sums.pop(0)
            sample_weight = 1.0 if sample_weight is None else tf.cast(sample_weight, tf.float64)
            metric.update_state(value, sample_weight=sample_weight * counts_here)

        def of_batch(leaf: Any) -> Any:
            if (source := self._source(leaf)) is not None:
                metric, key = source
                return metric.result() if key is None else metric.result()[key]
            if _is_number(leaf):
                return tf.cast(mean() / counts, getattr(leaf, "dtype", tf.float32))
            return None if leaf is None else last.pop(0)

        finished = iter([of_batch(leaf) for leaf in self._leaves()])
        if not isinstance(self._logs, dict):
            return tf.nest.map_structure(lambda leaf: next(finished), self._logs)
        results = self._results_by_name()
        others = {key: value for key, value in self._logs.items() if key not in self.names}
        others = tf.nest.map_structure(lambda leaf: next(finished), others)
        return {key: results[key] if key in self.names else others[key] for key in self._logs}

    def _leaves(self) -> list[Any]:
        """Return the logs but for those that go by a metric's name."""
        logs = self._logs
        if isinstance(logs, dict):
            logs = {key: value for key, value in logs.items() if key not in self.names}
        return tf.nest.flatten(logs)  # type: ignore[no-any-return]

    def others(self) -> list[Any]:
        """Return what is logged, but for what metrics have given."""
        return [leaf for leaf in self._leaves() if self._source(leaf) is None]

    def _source(self, leaf: Any) -> tuple[Any, str | None] | None:
        """Return the metric that gave a log, and the key, if one that was watched did."""
        for result, metric, key in self._results:
            if result is leaf:
                return metric, key
        return None

    def _results_by_name(self) -> dict[str, Any]:
        """Return what metrics give that have no stand-in, by the names they have in Keras's logs.

        They are those of layers, and others that the model keeps in no attribute.
        """
        watched = [*self._watched, loss_tracker(self._model)]
        results = {}
        for metric in self._model.metrics:
            # Compiled metrics that a custom step does not use are not built.
            if getattr(metric, "built", True) and not any(metric is other for other in watched):
                result = metric.result()
                results.update(result if isinstance(result, dict) else {metric.name: result})
        return results


def _is_number(leaf: Any) -> bool:
    """Return whether a log can be averaged."""
    if isinstance(leaf, float):
        return True
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return False
    shape = tf.TensorShape(leaf.shape)
    return bool(tf.as_dtype(leaf.dtype).is_floating and shape.is_fully_defined())
