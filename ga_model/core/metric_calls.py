"""Metrics that wait for the full batch, while one of its microbatches is recorded.

Numbers that go into a `keras.metrics.Mean` or `Sum` come from the step, from a layer, or from a
metric function that returns one. So while a step is recorded, a function stands in front of
`update_state` of both classes, and tells the thread's `MetricCalls`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from ga_model.base._context import ThreadValue
from ga_model.base._method_patch import MethodPatch

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

    Numbers may be computed inside of what is differentiated.

    Args:
        waits: whether metrics get numbers later.
        unnoted: returns a context for results: what they are divided by is of no microbatch.

    Attributes:
        updates: of metrics by one number each, which wait for the full batch.
        results: tensors that metrics gave, with the metric, and the key if it gave a dict.
        terms: of the compiled loss that is computed, by the ids of the metrics that track them.
    """

    def __init__(
        self, waits: bool, unnoted: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self.unnoted = unnoted
        self._waits = waits
        self.updates: list[MetricCall] = []
        self.results: list[tuple[Any, Any, str | None]] = []
        self.terms: dict[int, list[Any]] = {}

    def update(self, metric: Any, value: Any, sample_weight: Any) -> None:
        """Note an update."""
        terms = self.terms.get(id(metric))  # Keras updates it right after the loss
        term = terms[-1] if terms else None
        call = MetricCall(metric, keras.ops.stop_gradient(value), sample_weight, term)
        self.updates.append(call)
        if not self._waits:
            give(call._replace(value=value))

    def note_result(self, metric: Any, result: Any) -> Any:
        """Remember that something is a metric's result, and return it."""
        by_key = result if isinstance(result, dict) else {None: result}
        self.results += [(value, metric, key) for key, value in by_key.items()]
        return result


def give(call: MetricCall) -> None:
    """Update a metric with a number now."""
    base = keras.metrics.Mean if isinstance(call.metric, keras.metrics.Mean) else keras.metrics.Sum
    with waiting(None):
        base.update_state(call.metric, call.value, call.sample_weight)


@contextlib.contextmanager
def waiting(calls: MetricCalls | None) -> Iterator[None]:
    """Return a context in which this thread's updates of metrics by numbers wait.

    Args:
        calls: what collects them, or None: they do not wait.
    """
    with _updates_of_means.of(_MEANS if calls else ()), _calls.set(calls):
        yield


def _remembered(metric: Any, result: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(*args: Any, **kwargs: Any) -> Any:
        calls = _calls.get()
        if calls is None:
            return result(*args, **kwargs)
        with calls.unnoted():
            found = result(*args, **kwargs)
        return calls.note_result(metric, found)

    return remembered


# In its block results of metrics are remembered, whoever asks for them.
noting_results = MethodPatch("result", _remembered)


def _letting_wait(_: Any, update_state: Callable[..., Any]) -> Callable[..., Any]:
    def update(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        calls = _calls.get()
        # Values of samples do not wait, because they add up over microbatches.
        if calls is None or not (_is_scalar(values) and _is_scalar(sample_weight)):
            return update_state(metric, values, sample_weight)
        calls.update(metric, keras.ops.convert_to_tensor(values), sample_weight)
        return None

    return update


_updates_of_means = MethodPatch("update_state", _letting_wait)


def _is_scalar(value: Any) -> bool:
    return value is None or keras.ops.ndim(value) == 0
