"""Find by trial whether a step computes logs or metrics with weights that it has updated before,
or gradients with metrics that it updates.

On the full batch these are updated by then, in a window they are not. So the step runs once more on
a microbatch, and where it applies an optimizer, weights are exchanged for others. What it then logs
and gives to metrics is the same, or was computed with them. Likewise with other values of metrics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import torch

from ga_model.base._internals import counter_of, raw
from ga_model.hearing._metrics_of_user import parts_of
from ga_model.hearing._models import optimizers_in
from ga_model.torch_engine._batch_logs import values_of
from ga_model.torch_engine._metric_trials import noting
from ga_model.torch_engine._refusals import first_of
from ga_model.torch_engine._state import Before

WEIGHTS, COUNTERS = "weights", "counters"  # of updates
_TOLERANCE = 1e-3  # of numbers that are computed twice of the same


class OrderProbe:
    """Runs a step again on a microbatch to find out what follows from what it changes.

    Args:
        model: the model, which is left as it is.
        run: runs the step on data without an update, and exchanges weights where it has one if it
            is to; returns its recording and what it logs.
        data: the microbatch.
    """

    def __init__(self, model: Any, run: Callable[..., Any], data: Any) -> None:
        self._model = model
        self._run = run
        self._data = data
        self._metrics = [metric for whole in model.metrics for metric in parts_of(whole)]
        self._plain = self._given()

    def used_late(self) -> list[str]:
        """Return the names of what is updated, and used for logs or metrics after that."""
        target = self._plain.target
        if target is None:
            return []
        for what, names in (
            (WEIGHTS, [variable.path for variable in target.variables]),
            (COUNTERS, [counter_of(target.optimizer).path]),
        ):
            if not _are_same(self._plain.values, self._given(what).values):
                return first_of(names)
        return []

    def has_gradients_apart(self) -> bool:
        """Return whether gradients do not follow from what is updated, and none are all zero."""
        plain = self._plain.gradients
        counts = all(any(g is not None and bool(g.any()) for g in part) for part in plain)
        others = (self._given(what).gradients for what in (WEIGHTS, COUNTERS))
        return counts and all(_are_same(plain, other) for other in others)

    def metrics_used(self) -> list[str]:
        """Return the names of variables of metrics that are updated, and gradients follow from."""
        updated = [metric for metric in self._metrics if id(metric) in self._plain.updated]
        if not updated or self._has_same_gradients(updated):
            return []
        used = [metric for metric in updated if not self._has_same_gradients([metric])]
        return [variable.path for metric in used for variable in metric.variables]

    def _has_same_gradients(self, metrics: list[Any]) -> bool:
        """Return whether gradients stay the same with other values of metrics."""
        return _are_same(self._plain.gradients, self._given(others=metrics).gradients)

    def _given(self, exchanged: str | None = None, others: Sequence[Any] = ()) -> _Given:
        """Return what the step gives.

        Args:
            exchanged: what is exchanged where weights are updated: `WEIGHTS`, `COUNTERS` or None.
            others: metrics that have other values.
        """
        before = Before(self._model)
        try:
            for variable in [v for metric in others for v in metric.variables]:
                variable.assign(variable * 1.5 + 1)
            with noting(self._metrics) as calls, _weights_kept(self._model):
                recording, logs = self._run(self._data, exchanged)
        finally:
            before.put_back()
        arguments = [[*call] for found in calls.values() for call in found]
        values = keras.tree.flatten([list(values_of(recording, logs).values()), arguments])
        gradients = [[part.gradient(v) for v in part.variables] for part in recording.parts]
        target = recording.parts[0] if recording.parts else None
        return _Given(values, gradients, set(calls), target)


class _Given(NamedTuple):
    """What a step gave.

    Attributes:
        values: for logs and metrics.
        gradients: of each update, tensors or None.
        updated: ids of metrics.
        target: of its first update, or None.
    """

    values: list[Any]
    gradients: list[list[Any]]
    updated: set[int]
    target: Any


@contextlib.contextmanager
def _weights_kept(model: Any) -> Iterator[None]:
    """Put back in the end what is exchanged in a block."""
    counters = [counter_of(optimizer) for optimizer in optimizers_in(vars(model))]
    weights = [raw(variable) for variable in [*model.trainable_weights, *counters]]
    before = [weight.data for weight in weights]
    try:
        yield
    finally:
        for weight, data in zip(weights, before):
            weight.data = data


def exchange(what: str, optimizer: Any, variables: list[Any]) -> None:
    """Give variables other values, in other memory: what was computed with them stays valid.

    Args:
        what: `WEIGHTS` or `COUNTERS`.
        optimizer: that is applied.
        variables: to these.
    """
    if what == COUNTERS:
        counter = raw(counter_of(optimizer))
        counter.data = 2 * counter.data + 1000
        return
    for variable in map(raw, variables):
        variable.data = 0.3 - 0.7 * variable.data


def _are_same(ones: list[Any], others: list[Any]) -> bool:
    ones, others = keras.tree.flatten(ones), keras.tree.flatten(others)
    return len(ones) == len(others) and all(map(_is_same, ones, others))


def _is_same(one: Any, other: Any) -> bool:
    if not (torch.is_tensor(one) or isinstance(one, (float, int))):
        return True
    first, second = (torch.as_tensor(value).detach().double() for value in (one, other))
    if first.shape != second.shape:
        return False
    return bool(torch.allclose(first, second, rtol=_TOLERANCE, atol=1e-7, equal_nan=True))
