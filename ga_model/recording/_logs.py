"""The logs of a batch that ran in microbatches, or of a window that it is a part of.

A metric that sees targets and predictions sees every row once, whatever the microbatches are. What
a step tracks of the loss is another matter: there is one value per microbatch, where the whole
batch has one, and microbatches count differently. So numbers that go into a `keras.metrics.Mean` or
`Sum` wait for all microbatches of the batch. The metric then has the value of the window so far in
place of the one it had before,

    sum_i(w_i * value_i) / sum_i(w_i)

over all microbatches i of it, with the weights of `_weights`. When the window is full, that is the
value of the full batch. The logs that a step returns are read when all microbatches are through:
what a metric gave is asked from the metric again, other numbers are combined as above, and of
anything else, and of what follows from no sample, the last microbatch's stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ga_model.base._context import graph_being_made
from ga_model.base._internals import loss_tracker
from ga_model.hearing import _metric_calls
from ga_model.replicas import _strategy


class MetricCalls(_metric_calls.MetricCalls):
    """What metrics got and gave. In an inner graph, a branch of `tf.cond` say, none waits.

    Attributes:
        given: metrics, and the tensors that the step has given them.
        of_keras: numbers of the operations by which code of Keras's has updated metrics.
    """

    def __init__(self) -> None:
        super().__init__()
        self._graph = graph_being_made()
        self.given: list[tuple[Any, list[Any]]] = []
        self.of_keras: list[range] = []

    @contextlib.contextmanager
    def updating(self, metric: Any, arguments: Any) -> Iterator[None]:
        graph = graph_being_made()
        if graph is None or graph is not self._graph:
            yield
            return
        tensors = filter(tf.is_symbolic_tensor, tf.nest.flatten(arguments))
        self.given.append((metric, list(tensors)))
        first = len(graph.get_operations())
        yield
        self.of_keras.append(range(first, len(graph.get_operations())))

    def waits_for(self, values: Any, sample_weight: Any = None) -> bool:
        is_here = self._graph in (None, graph_being_made())
        return is_here and super().waits_for(values, sample_weight)


class _Update(NamedTuple):
    """The update of a metric by the number of a batch.

    Attributes:
        metric: the metric.
        is_of_term: whether the number is a term of the compiled loss.
        is_count: whether what it counts is a number of samples, which is summed over microbatches.
        weight: what else it counts, a number.
        least: what the denominator of the full batch counts as at least.
    """

    metric: Any
    is_of_term: bool
    is_count: bool
    weight: Any
    least: float


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
        self._updates: list[_Update] = []
        self._results = recording.metrics.results
        self._watched = recording.metrics.watched
        self._combined: list[Any] = []  # numbers among the logs,
        self._least: list[float] = []  # and what their denominators count as at least
        self.names = set(self._results_by_name()) if isinstance(logs, dict) else set()
        for metric, value, sample_weight, term in recording.metrics.updates:
            mean = recording.mean_of(value, metric, term)
            self.sums += mean[:2]
            is_count = term is None and recording.numbers.is_count(sample_weight)
            if is_count:
                self.sums.append(tf.cast(sample_weight, tf.float64))
            is_one = term is not None or is_count or sample_weight is None
            weight = 1.0 if is_one else sample_weight
            self._updates.append(_Update(metric, term is not None, is_count, weight, mean.least))
        for leaf in self.others():
            if _is_number(leaf, recording.numbers):
                mean = recording.mean_of(leaf)
                self.sums += mean[:2]
                self._combined.append(leaf)
                self._least.append(mean.least)
            elif leaf is not None:
                self.last.append(tf.convert_to_tensor(leaf))

    def finish(
        self,
        sums: list[Any],
        last: list[Any],
        rows: int | None,
        num_counted: Any,
        add_to_window: Callable[[Any, Any], Any] | None,
    ) -> Any:
        """Update the metrics, and return the logs of the batch, or of its window so far.

        Args:
            sums, last: what the attributes have come to.
            rows: rows of the batch where they are known without running the graph.
            num_counted: int64 scalar tensor, microbatches that were not left out. With none,
                metrics stay as they are, and numbers are NaN.
            add_to_window: adds a float64 vector to those of the window's batches before, which it
                returns, and is given what tells such vectors apart. Or None: there is no window.
        """
        num_counted = tf.cast(num_counted, tf.float64)
        has_counted = tf.cast(tf.greater(num_counted, 0), tf.float64)
        *sums, num_counted = _strategy.mean_over_replicas([*sums, num_counted])
        of_batch = [num_counted]
        for update in self._updates:
            of_batch += [sums.pop(0), sums.pop(0)]
            if update.is_count:
                of_batch.append(sums.pop(0) * has_counted)
            else:  # Keras counts the outputs' losses by their rows
                number = rows if update.is_of_term and rows is not None else 1
                of_batch.append(number * has_counted)
        of_batch += sums
        before, after = [tf.zeros_like(number) for number in of_batch], of_batch
        if add_to_window is not None:
            vector = tf.concat([tf.reshape(number, [-1]) for number in of_batch], axis=0)
            key = (*(id(update.metric) for update in self._updates), int(vector.shape[0]))
            known = add_to_window(key, vector)
            before, after = (_unpacked(sums, of_batch) for sums in (known, known + vector))
        num_counted, *sums = after
        self._update_metrics(before[1:], sums, rows)
        means, least = iter(sums[3 * len(self._updates) :]), iter(self._least)
        counts, last = tf.cast(tf.greater(num_counted, 0), tf.float64), list(last)

        def of_window(leaf: Any) -> Any:
            if (source := self._source(leaf)) is not None:
                metric, key = source
                return metric.result() if key is None else metric.result()[key]
            if any(leaf is number for number in self._combined):
                mean = _divided(next(means), next(means), next(least)) / counts
                dtype = tf.as_dtype(getattr(leaf, "dtype", tf.float32))
                return tf.cast(tf.round(mean) if dtype.is_integer else mean, dtype)
            return None if leaf is None else last.pop(0)

        finished = iter([of_window(leaf) for leaf in self._leaves()])
        if not isinstance(self._logs, dict):
            return tf.nest.map_structure(lambda leaf: next(finished), self._logs)
        results = self._results_by_name()
        others = {key: value for key, value in self._logs.items() if key not in self.names}
        others = tf.nest.map_structure(lambda leaf: next(finished), others)
        return {key: results[key] if key in self.names else others[key] for key in self._logs}

    def _update_metrics(self, before: list[Any], after: list[Any], rows: int | None) -> None:
        """Put the value of the window so far in the place of the one that metrics have.

        Args:
            before: three scalars for each update: numerator, denominator, and what it counts, as
                they were before the batch.
            after: the same after it.
            rows: as `finish` takes it.
        """
        means = [isinstance(update.metric, keras.metrics.Mean) for update in self._updates]
        # A mean that was reset within the window has nothing of it.
        resets = [
            tf.equal(update.metric.count, 0) if is_mean else tf.constant(False)
            for update, is_mean in zip(self._updates, means)
        ]
        for number, (update, is_mean) in enumerate(zip(self._updates, means)):
            part = slice(3 * number, 3 * number + 3)
            is_sum = update.is_count or (update.is_of_term and rows is not None)
            total, count = _amount(after[part], update, is_sum)
            known, known_count = (
                tf.where(resets[number], tf.zeros_like(amount), amount)
                for amount in _amount(before[part], update, is_sum)
            )
            metric = update.metric
            metric.total.assign_add(tf.cast(total - known, metric.dtype))
            if is_mean:
                metric.count.assign_add(tf.cast(count - known_count, metric.dtype))

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


def _unpacked(vector: Any, numbers: list[Any]) -> list[Any]:
    """Return the parts of a vector, in the shapes of some numbers."""
    parts = tf.split(vector, [number.shape.num_elements() for number in numbers])
    return [tf.reshape(part, number.shape) for part, number in zip(parts, numbers, strict=True)]


def _amount(sums: list[Any], update: _Update, is_sum: bool) -> tuple[Any, Any]:
    """Return what a value adds to a mean, and what it counts there: float64 scalars.

    Args:
        sums: numerator, denominator, and what was counted.
        update: the update.
        is_sum: whether what was counted is summed over batches. Else it counts once, if at all.
    """
    numerator, denominator, count = sums
    if not is_sum:
        count = tf.minimum(count, tf.ones_like(count))
    count *= tf.cast(update.weight, tf.float64)
    return _divided(numerator, denominator, update.least) * count, count


def _divided(numerator: Any, denominator: Any, least: float) -> Any:
    if least:
        denominator = tf.maximum(denominator, tf.constant(least, tf.float64))
    return tf.math.divide_no_nan(numerator, denominator)


def _is_number(leaf: Any, numbers: Any) -> bool:
    """Return whether a log is put together from those of microbatches: a mean, or a sum.

    Args:
        leaf: the log.
        numbers: the `LoggedNumbers` of the step.
    """
    if isinstance(leaf, float):
        return bool(numbers.follows_from_samples(leaf))
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        return False
    dtype = tf.as_dtype(leaf.dtype)
    if not tf.TensorShape(leaf.shape).is_fully_defined():
        return False
    if dtype.is_integer:
        return bool(numbers.is_sum(leaf))
    return bool(dtype.is_floating and numbers.follows_from_samples(leaf))
