"""Find out what a step gives to metrics and logs, and tell what differs from the full batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ga_model.hearing import _messages
from ga_model.hearing._models import is_of_keras
from ga_model.torch_engine import _refusals
from ga_model.torch_engine._batch_logs import BatchLogs, values_of
from ga_model.torch_engine._divisors import is_to_try
from ga_model.torch_engine._late_values import OrderProbe
from ga_model.torch_engine._probes import DoesNotAddUpError


class LoggedValues:
    """What a step gives to metrics and logs that has run on one of several microbatches.

    Args:
        recording: of the step.
        logs: what it has returned.
        run: runs the step on data without an update, and exchanges what it has updated where it has
            one, `WEIGHTS` or `COUNTERS`; returns its recording and what it logs.
        data: the microbatch, of two samples if there are any.
    """

    def __init__(self, recording: Any, logs: Any, run: Callable[..., Any], data: Any) -> None:
        self._model = recording.model
        self._recording = recording
        self._logs = logs
        self._run = run
        self._data = data

    def look(self, so_far: BatchLogs, is_split: bool, must_add_up: bool) -> None:
        """Find out what they are, where that is due, and tell of what differs.

        Args:
            so_far: the logs of the batch.
            is_split: whether it is split.
            must_add_up: whether a step that does not add up is to see the full batch.

        Raises:
            DoesNotAddUpError: a metric needs the full batch, which it can get.
        """
        self._look_at_order()
        accumulation = self._model._accumulation
        is_first = self._recording.losses.is_first_of_window
        if not accumulation.numbers.is_due(values_of(self._recording, self._logs), is_first):
            return
        names = so_far.names_of_numbers(self._recording, self._logs)
        can_be_whole = must_add_up and not accumulation.has_run_by_microbatches
        for number in accumulation.numbers.look(names, self._run, self._data):
            message = _messages.number_of_batches_message(
                self._model.name, number.what, number.place, is_split
            )
            # For other logs, the full batch is too much.
            if can_be_whole and number.is_of_samples:
                raise DoesNotAddUpError(message)
            accumulation.numbers.told.add(number.key)
            self._model._warn_once(message)

    def _look_at_order(self) -> None:
        """Find out if a step of the user's own computes with what it changes itself.

        What it logs is tried once, gradients that it takes after an update again and again.
        """
        model, parts = self._model, self._recording.parts
        accumulation = model._accumulation
        if is_of_keras(model, "train_step") or self._is_told_of_late_gradients():
            return
        has_looked, accumulation.has_looked_at_order = accumulation.has_looked_at_order, True
        if has_looked or not parts:
            return
        late, used = [], []
        with contextlib.suppress(Exception):  # of a step that takes no other weights
            probe = OrderProbe(model, self._run, self._data)
            late, used = probe.used_late(), probe.metrics_used()
        if late:
            model._warn_once(
                _messages.late_values_message(model.name, parts[0].optimizer.name, late)
            )
        if used:
            model._warn_once(_messages.metrics_used_message(model.name, used))

    def _is_told_of_late_gradients(self) -> bool:
        """Tell of gradients that follow from what was updated before, and return whether they do.

        Those that cannot be tried, or that are zero, are told of, too.
        """
        model, accumulation = self._model, self._model._accumulation
        if accumulation.has_told_of_late or not self._recording.is_late:
            return bool(accumulation.has_told_of_late)
        accumulation.num_late += 1
        if not is_to_try(accumulation.num_late):
            return False
        is_apart = False
        with contextlib.suppress(Exception):  # of a step that takes no other weights
            is_apart = OrderProbe(model, self._run, self._data).has_gradients_apart()
        accumulation.has_told_of_late = not is_apart
        if not is_apart:
            model._warn_once(_refusals.several_optimizers_message(model.name))
        return not is_apart
