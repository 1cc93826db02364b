"""Delay updates of metrics until the full batch is known, while its microbatches are recorded.

Scalars that go into a `keras.metrics.Mean` or `Sum` come from the step, a layer, or a metric
function that returns one. While a step is recorded, a patch of `update_state` of both classes
passes these scalars to the thread's `MetricCalls`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from ga_model.base._context import ThreadValue
from ga_model.base._method_patch import MethodPatch
from ga_model.base._types import Nest, Scalar, Tensor
from ga_model.core.weights import Term

_MEANS = (keras.metrics.Mean, keras.metrics.Sum)  # these receive the results of metric functions
_calls = ThreadValue()  # the `MetricCalls` of this thread, or None


class MetricCall(NamedTuple):
    """An update of a metric by a scalar, and the loss term whose value it is, or None."""

    metric: keras.Metric
    value: Scalar
    sample_weight: Scalar | None
    term: Term | None


class MetricCalls:
    """The updates and results of metrics while one microbatch is recorded.

    Scalars may be computed inside the differentiated function.

    Args:
        waits: whether to delay updates of metrics.
        unnoted: returns a context for computing results, whose divisors are not noted.

    Attributes:
        updates: delayed updates of metrics by one scalar each.
        results: results of metrics, each with the metric, and its key if the result is a dict.
        terms: terms of the compiled loss being computed, by ids of the metrics that track them.
    """

    def __init__(
        self, waits: bool, unnoted: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self.unnoted = unnoted
        self._waits = waits
        self.updates: list[MetricCall] = []
        self.results: list[tuple[Tensor, keras.Metric, str | None]] = []
        self.terms: dict[int, list[Term]] = {}

    def update(self, metric: keras.Metric, value: Scalar, sample_weight: Scalar | None) -> None:
        """Record an update."""
        terms = self.terms.get(id(metric))  # Keras updates the metric right after the loss
        term = terms[-1] if terms else None
        call = MetricCall(metric, keras.ops.stop_gradient(value), sample_weight, term)
        self.updates.append(call)
        if not self._waits:
            give(call._replace(value=value))

    def note_result(self, metric: keras.Metric, result: Nest) -> Nest:
        """Record a result of a metric, and return it."""
        by_key = result if isinstance(result, dict) else {None: result}
        self.results += [(value, metric, key) for key, value in by_key.items()]
        return result


def give(call: MetricCall) -> None:
    """Update a metric by a scalar now."""
    base = keras.metrics.Mean if isinstance(call.metric, keras.metrics.Mean) else keras.metrics.Sum
    with delaying_updates(None):
        base.update_state(call.metric, call.value, call.sample_weight)


@contextlib.contextmanager
def delaying_updates(calls: MetricCalls | None) -> Iterator[None]:
    """Delay updates of metrics by scalars in this thread.

    Args:
        calls: what collects them, or None for no delay.
    """
    with _updates_of_means.of(_MEANS if calls else ()), _calls.set(calls):
        yield


def _recorded(metric: keras.Metric, result: Callable[..., Nest]) -> Callable[..., Nest]:
    def recorded(*args: Any, **kwargs: Any) -> Nest:
        calls = _calls.get()
        if calls is None:
            return result(*args, **kwargs)
        with calls.unnoted():
            value = result(*args, **kwargs)
        return calls.note_result(metric, value)

    return recorded


# Within its context, all results of metrics are recorded.
noting_results = MethodPatch("result", _recorded)


def _delayed(_: type[keras.Metric], update_state: Callable[..., Any]) -> Callable[..., Any]:
    def update(metric: keras.Metric, values: Tensor, sample_weight: Tensor | None = None) -> Any:
        calls = _calls.get()
        # Values per sample add up over microbatches, so they are not delayed.
        if calls is None or not (_is_scalar(values) and _is_scalar(sample_weight)):
            return update_state(metric, values, sample_weight)
        calls.update(metric, keras.ops.convert_to_tensor(values), sample_weight)
        return None

    return update


_updates_of_means = MethodPatch("update_state", _delayed)


def _is_scalar(value: Tensor | None) -> bool:
    return value is None or keras.ops.ndim(value) == 0
