"""Find by trial whether a step computes logs or metrics with weights that it has updated before.

On the full batch these are updated by then, in a window they are not. So the step runs once more on
a microbatch, and where it applies an optimizer, weights are exchanged for others. What it then logs
and gives to metrics is the same, or was computed with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch

from ga_model.base._internals import raw
from ga_model.hearing._metrics_of_user import parts_of
from ga_model.torch_engine._batch_logs import values_of
from ga_model.torch_engine._metric_trials import noting
from ga_model.torch_engine._state import Before

_TOLERANCE = 1e-3  # of numbers that are computed twice of the same


def uses_late(model: Any, run: Callable[[Any, bool], Any], data: Any) -> bool:
    """Return whether what a step logs, or gives to metrics, follows from updated weights.

    Args:
        model: the model, which is left as it is.
        run: runs the step on data without an update, and exchanges weights where it has one if it
            is to; returns its recording and what it logs.
        data: the microbatch.
    """
    metrics = [metric for whole in model.metrics for metric in parts_of(whole)]

    def given(exchanges: bool) -> list[Any]:
        before = Before(model)
        try:
            with noting(metrics) as calls, _weights_kept(model):
                recording, logs = run(data, exchanges)
        finally:
            before.put_back()
        arguments = [[*call] for found in calls.values() for call in found]
        return list(keras.tree.flatten([list(values_of(recording, logs).values()), arguments]))

    first, second = given(False), given(True)
    return len(first) != len(second) or not all(map(_is_same, first, second))


@contextlib.contextmanager
def _weights_kept(model: Any) -> Iterator[None]:
    """Put back in the end the weights that are exchanged in a block."""
    weights = [raw(variable) for variable in model.trainable_weights]
    before = [weight.data for weight in weights]
    try:
        yield
    finally:
        for weight, data in zip(weights, before):
            weight.data = data


def exchange(variables: list[Any]) -> None:
    """Give variables other values, in other memory: what was computed with them stays valid."""
    for variable in map(raw, variables):
        variable.data = 0.3 - 0.7 * variable.data


def _is_same(one: Any, other: Any) -> bool:
    if not (torch.is_tensor(one) or isinstance(one, float)):
        return True
    first, second = (torch.as_tensor(value).detach().double() for value in (one, other))
    if first.shape != second.shape:
        return False
    return bool(torch.allclose(first, second, rtol=_TOLERANCE, atol=1e-7, equal_nan=True))
