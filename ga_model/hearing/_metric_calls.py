"""Metrics that wait for the full batch, while one of its microbatches is recorded.

Numbers that go into a `keras.metrics.Mean` or `Sum` come from the step, from a layer, or from a
metric function that returns one. So while a step is recorded, a function stands in front of
`update_state` of both classes, and tells the thread's `MetricCalls`. Another one does in front of
those of Keras's classes that count samples, which metrics of the user's may hold or extend.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras

from ga_model.base._context import ThreadValue
from ga_model.base._identity import unique
from ga_model.base._in_front import InFront
from ga_model.hearing._stand_in import StandIn

_MEANS = (keras.metrics.Mean, keras.metrics.Sum)  # what functions give goes on to these
_calls = ThreadValue()  # the `MetricCalls` of this thread, or None


class MetricCall(NamedTuple):
    """An update of a metric, and the loss term that its value is of, or None."""

    metric: Any
    value: Any
    sample_weight: Any
    term: Any


class MetricCalls:
    """What metrics got and gave while one microbatch was recorded.

    Attributes:
        updates: updates that wait for the full batch.
        watched: metrics that the step used through stand-ins.
        results: tensors that metrics gave, with the metric, and the key if it gave a dict.
        has_late_updates: whether an update that waits came after a result of its metric.
        resets: metrics that the step has reset.
    """

    def __init__(self) -> None:
        self.updates: list[MetricCall] = []
        self.watched: list[Any] = []
        self.results: list[tuple[Any, Any, str | None]] = []
        self.has_late_updates = False
        self.resets: list[Any] = []

    def waits_for(self, values: Any, sample_weight: Any = None) -> bool:
        """Return whether an update of a `Mean` or a `Sum` has to wait for the full batch.

        Values of samples do not, because they add up over microbatches.
        """
        return _is_scalar(values) and _is_scalar(sample_weight)

    def update(self, metric: Any, value: Any, sample_weight: Any, term: Any = None) -> None:
        """Let an update wait. `term` is the loss term that `value` is of, if it is one's."""
        self.has_late_updates |= any(metric is other for _, other, _ in self.results)
        self.updates.append(MetricCall(metric, value, sample_weight, term))

    def updating(self, metric: Any, arguments: Any) -> contextlib.AbstractContextManager[None]:
        """Note in a block that code of Keras's updates a metric, where somebody looks at that."""
        return contextlib.nullcontext()

    def updates_by_key(self) -> dict[tuple[int, int], MetricCall]:
        """Return the updates by the id of their metric, and their number among those of it."""
        found: dict[tuple[int, int], MetricCall] = {}
        for update in self.updates:
            number = sum(update.metric is call.metric for call in found.values())
            found[id(update.metric), number] = update
        return found

    def values_of(self, metric: Any) -> list[Any]:
        """Return what a metric got that waits."""
        return [update.value for update in self.updates if update.metric is metric]

    def result(self, metric: Any) -> Any:
        """Return the metric's result, and remember that it is that."""
        self.watched.append(metric)
        return self.note_result(metric, metric.result())

    def note_result(self, metric: Any, result: Any) -> Any:
        """Remember that something is a metric's result, and return it."""
        by_key = result if isinstance(result, dict) else {None: result}
        self.results += [(value, metric, key) for key, value in by_key.items()]
        return result


class MetricStandIn(StandIn):
    """Stands in for a metric in an attribute of the model during one recorded step.

    It tells the `MetricCalls`.
    """

    def update_state(self, *args: Any, **kwargs: Any) -> Any:
        self._listener.watched.append(self._original)
        return self._original.update_state(*args, **kwargs)

    def reset_state(self) -> None:
        self._listener.resets.append(self._original)
        self._original.reset_state()

    def result(self) -> Any:
        return self._listener.result(self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.update_state(*args, **kwargs)
        return self.result()


@contextlib.contextmanager
def waiting(calls: MetricCalls | None) -> Iterator[None]:
    """Let numbers that this thread gives to metrics wait in a block.

    Args:
        calls: what is told of them, or None: they do not wait.
    """
    if calls is None:
        with _calls.set(None):
            yield
        return
    with _in_front.of(_MEANS), _noting.of(_of_samples()), _calls.set(calls):
        yield


def noting_results(metrics: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which results of metrics are remembered, whoever asks for them."""
    return _results.of(metrics)


def _remembered(metric: Any, result: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(*args: Any, **kwargs: Any) -> Any:
        found, calls = result(*args, **kwargs), _calls.get()
        return found if calls is None else calls.note_result(metric, found)

    return remembered


_results = InFront("result", _remembered)


def _noted(_: Any, update_state: Callable[..., Any]) -> Callable[..., Any]:
    def update(metric: Any, *args: Any, **kwargs: Any) -> Any:
        calls = _calls.get()
        if calls is None:
            return update_state(metric, *args, **kwargs)
        with calls.updating(metric, (args, kwargs)):
            return update_state(metric, *args, **kwargs)

    return update


def _letting_wait(owner: Any, update_state: Callable[..., Any]) -> Callable[..., Any]:
    update_now = _noted(owner, update_state)

    def update(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        calls = _calls.get()
        if calls is None or not calls.waits_for(values, sample_weight):
            return update_now(metric, values, sample_weight)
        calls.update(metric, keras.ops.convert_to_tensor(values), sample_weight)
        return None

    return update


_in_front = InFront("update_state", _letting_wait)
_noting = InFront("update_state", _noted)


@functools.cache
def _of_samples() -> list[Any]:
    """Return the classes of Keras that count what they get of each sample by code of their own."""
    public = [value for value in vars(keras.metrics).values() if isinstance(value, type)]
    classes = unique(part for metric in public for part in metric.__mro__)
    return [
        value
        for value in classes
        if "update_state" in vars(value)
        and value is not keras.metrics.Metric
        and not issubclass(value, _MEANS)
    ]


def _is_scalar(value: Any) -> bool:
    return value is None or keras.ops.ndim(value) == 0
