"""The logs of a batch that ran in microbatches, or of a window that it is a part of.

As on TensorFlow (`recording/_logs.py`): scalars that go into a `keras.metrics.Mean` or `Sum` wait
for all microbatches of the batch. The metric then has the value of the window so far in place of
the one it had before. Of other metrics the updates add up as they are. Numbers that a step returns
are combined with the same weights, and what a metric gave is asked of it again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import keras
import numpy as np
import torch

from ga_model.base._identity import is_in
from ga_model.base._internals import loss_tracker
from ga_model.torch_engine._numbers import is_integer


class Amount(NamedTuple):
    """What a number has come to over microbatches.

    Attributes:
        numerator, denominator: of their mean, or sum.
        count: what a metric counts it as, summed.
        num_added: microbatches that have counted.
    """

    numerator: Any = 0.0
    denominator: float = 0.0
    count: Any = 0.0
    num_added: int = 0

    def plus(self, other: Amount) -> Amount:
        """Return what both come to."""
        return Amount(*(one + another for one, another in zip(self, other)))

    def value(self) -> Any:
        return self.numerator / self.denominator if self.denominator else 0.0


_NOTHING = Amount()


class _Update(NamedTuple):
    """The update of a metric by the number of a batch.

    Attributes:
        metric: the metric.
        is_sum: whether what it counts is summed over microbatches. Else it counts once per window.
        weight: what it counts then.
    """

    metric: Any
    is_sum: bool
    weight: float

    def added(self, amount: Amount) -> tuple[Any, Any]:
        """Return what an amount adds to the metric: to its total, and to its count."""
        count = amount.count if self.is_sum else self.weight * min(amount.num_added, 1)
        return amount.value() * count, count


class BatchLogs:
    """The logs and metric updates of a batch, put together from those of its microbatches.

    Args:
        model: the `AccumulatingModel`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._updates: dict[Hashable, _Update] = {}
        self._amounts: dict[Hashable, Amount] = {}  # of the batch
        self._before: dict[Hashable, Amount] = {}  # of the window
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
        metrics = recording.metrics
        self._watched = list(metrics.watched)
        self._logs = logs
        if self._names is None:
            names = self._results_by_name(self._watched) if isinstance(logs, dict) else {}
            self._names = set(names)
        with torch.no_grad():
            for key, call in metrics.updates_by_key().items():
                count = self._note_update(key, call, recording.losses.num_rows())
                mean = recording.mean_of(call.value, call.metric, call.term, key)
                self._add(key, mean, count, counts)
            for place, (key, leaf) in enumerate(leaves_of(logs)):
                if key in self._names:
                    continue
                source = [(m, k) for result, m, k in metrics.results if result is leaf]
                if source:
                    self._sources[place] = source[0]
                elif _is_number(leaf):
                    number = _key_of(place, leaf)
                    self._add(number, recording.mean_of(leaf, key=number), 1.0, counts)

    def names_of_numbers(self, recording: Any, logs: Any) -> dict[tuple[Any, ...], str]:
        """Return what numbers are called of which the losses of a step tell nothing, by their keys.

        Args:
            recording: the recording.
            logs: what the step returned.
        """
        found: dict[tuple[Any, ...], str] = {}
        for key, (metric, value, _, term) in recording.metrics.updates_by_key().items():
            if term is None and not recording.is_loss(value, metric, key):
                found[key] = f"the metric {metric.name!r}"
        results = [result for result, *_ in recording.metrics.results]
        names = self._results_by_name(recording.metrics.watched) if isinstance(logs, dict) else {}
        for place, (name, leaf) in enumerate(leaves_of(logs)):
            is_of_metric = name in names or is_in(leaf, results)
            if _is_number(leaf) and not is_of_metric:
                number = _key_of(place, leaf)
                if not recording.is_loss(leaf, key=number):
                    found[number] = f"the log {name!r}"
        return found

    def _note_update(self, key: Hashable, call: Any, rows: int) -> Any:
        """Note the update of a metric, and return what it counts."""
        metric, _, weight, term = call
        # Keras gives the number of samples; a step of the user's own may give none.
        is_tracked = metric is loss_tracker(self._model) and weight is not None
        is_rows = is_tracked or term is not None
        is_sum = is_rows or torch.is_tensor(weight) or weight == rows
        weight = rows if is_rows else 1.0 if weight is None else weight
        self._updates[key] = _Update(metric, is_sum, 1.0 if is_sum else float(weight))
        return weight

    def _add(self, key: Hashable, mean: tuple[Any, float], count: Any, counts: bool) -> None:
        amount = Amount(*mean, count, 1) if counts else _NOTHING
        self._amounts[key] = self._amounts.get(key, _NOTHING).plus(amount)

    def add_to(self, window: dict[Hashable, Amount]) -> None:
        """Add the numbers of the batch to those of its window."""
        for key, amount in self._amounts.items():
            self._before[key] = window.get(key, _NOTHING)
            window[key] = self._before[key].plus(amount)

    def finish(self) -> Any:
        """Update the metrics, and return the logs of the batch, or of its window so far."""
        self._update_metrics()
        results = self._results_by_name(self._watched)
        values = []
        for place, (key, leaf) in enumerate(leaves_of(self._logs)):
            amount = self._so_far(_key_of(place, leaf))
            if isinstance(self._logs, dict) and key in results:
                values.append(results[key])
            elif place in self._sources:
                metric, name = self._sources[place]
                values.append(metric.result() if name is None else metric.result()[name])
            elif amount is not None:
                values.append(_like(leaf, amount.value() if amount.num_added else math.nan))
            else:
                values.append(leaf)
        logs = keras.tree.pack_sequence_as(self._logs, values)
        return {key: logs[key] for key in self._logs} if isinstance(logs, dict) else logs

    def _so_far(self, key: Hashable) -> Amount | None:
        """Return what a number has come to in the window, or None: it is not put together."""
        if key not in self._amounts or self._model._accumulation.numbers.kind_of(key) == "last":
            return None
        return self._before.get(key, _NOTHING).plus(self._amounts[key])

    def _update_metrics(self) -> None:
        """Put the value of the window so far in the place of the one that metrics have."""
        # A mean that was reset within the window has nothing of it.
        resets = {
            key: isinstance(update.metric, keras.metrics.Mean) and not float(update.metric.count)
            for key, update in self._updates.items()
        }
        for key, update in self._updates.items():
            metric, now = update.metric, self._so_far(key) or _NOTHING
            before = _NOTHING if resets[key] else self._before.get(key, _NOTHING)
            (total, count), (known, known_count) = update.added(now), update.added(before)
            metric.total.assign_add(keras.ops.cast(total - known, metric.dtype))
            if isinstance(metric, keras.metrics.Mean):
                metric.count.assign_add(keras.ops.cast(count - known_count, metric.dtype))

    def _results_by_name(self, watched: list[Any]) -> dict[str, Any]:
        """Return what metrics give that have no stand-in, by the names they have in Keras's logs.

        They are those of layers, and others that the model keeps in no attribute.

        Args:
            watched: metrics that had one.
        """
        watched = [*watched, loss_tracker(self._model)]
        results: dict[str, Any] = {}
        for metric in self._model.metrics:
            # Compiled metrics that a custom step does not use are not built.
            if getattr(metric, "built", True) and not is_in(metric, watched):
                result = metric.result()
                results.update(result if isinstance(result, dict) else {metric.name: result})
        return results


def leaves_of(logs: Any) -> list[tuple[Any, Any]]:
    """Return logs in their order, each with the name that it has in a dict of them, or None."""
    if not isinstance(logs, dict):
        return [(None, leaf) for leaf in keras.tree.flatten(logs)]
    paths = keras.tree.flatten_with_path(logs)
    return [(path[0] if len(path) == 1 else None, leaf) for path, leaf in paths]


def _key_of(place: int, leaf: Any) -> tuple[Any, ...]:
    """Return what tells numbers apart that are logged. Those of other shapes are others."""
    return ("log", place, tuple(getattr(leaf, "shape", ())))


def values_of(recording: Any, logs: Any) -> dict[Hashable, Any]:
    """Return the numbers that a step gave to metrics and logs, by their keys."""
    found: dict[Hashable, Any] = {
        key: call.value for key, call in recording.metrics.updates_by_key().items()
    }
    leaves = enumerate(leaf for _, leaf in leaves_of(logs))
    return {**found, **{_key_of(place, leaf): leaf for place, leaf in leaves if _is_number(leaf)}}


def _is_number(leaf: Any) -> bool:
    """Return whether a log can be averaged or summed."""
    if torch.is_tensor(leaf):
        return not (leaf.dtype == torch.bool or leaf.is_complex())
    if isinstance(leaf, (np.generic, np.ndarray)):
        return np.issubdtype(leaf.dtype, np.integer) or np.issubdtype(leaf.dtype, np.floating)
    return isinstance(leaf, (float, int)) and not isinstance(leaf, bool)


def _like(leaf: Any, value: Any) -> Any:
    """Return a number as another one is: an integer, or a tensor of some dtype on some device.

    An integer of no samples is zero.
    """
    if is_integer(leaf):
        value = torch.as_tensor(value).double().nan_to_num().round()
    if isinstance(leaf, (np.generic, np.ndarray)):
        return torch.as_tensor(value).cpu().numpy().astype(leaf.dtype)[()]
    return torch.as_tensor(value).to(leaf) if torch.is_tensor(leaf) else type(leaf)(value)
