"""Metrics and logs that are given one number of a batch, such as its Dice coefficient.

A metric that counts what it gets of each sample has counted the same when all microbatches are
through. One that averages a number over the batches that it sees has averaged other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from ga_model.base._identity import is_in, unique
from ga_model.base._internals import compiled_loss, loss_tracker
from ga_model.hearing import _messages
from ga_model.hearing._metrics_of_user import counts_samples, parts_of
from ga_model.reading._denominators import (
    NOT_LINEAR,
    OF_SUM,
    OF_WEIGHTS,
    SEVERAL,
    UNKNOWN,
    Obstacle,
    StepLoss,
)
from ga_model.reading._following import added_to_variable, adds_to_variable
from ga_model.reading._operations import OPAQUE, number_of
from ga_model.reading._place import place_of
from ga_model.recording._logs import MetricCalls
from ga_model.recording._losses import StepLosses

_BREAKS = (NOT_LINEAR, SEVERAL, UNKNOWN)
_EXTREMES = (("Max", "Maximum"), ("Min", "Minimum"))  # of a batch, and of all so far


def tell_of_numbers(recording: Any, written: Callable[[Any, Any], list[Any]]) -> None:
    """Tell of numbers for metrics and logs that are no means or sums over samples.

    Args:
        recording: of a step that was drawn in a graph.
        written: returns what it has written to variables, but by some operations.
    """
    model, losses, calls = recording.model, recording.losses, recording.metrics

    def written_by_user(variables: Any) -> list[Any]:
        return written(variables, calls.of_keras)

    numbers = _Numbers(calls.values_of, written_by_user, losses, not model.run_eagerly)
    is_split, is_ruled = recording.is_split(), model._has_rule()

    def message(what: str, place: str) -> str:
        return _messages.number_of_batches_message(model.name, what, place, is_split)

    of_losses = [loss_tracker(model), *getattr(compiled_loss(model), "metrics", ())]
    for metric in _of_batches(model.metrics, of_losses, numbers):
        if metric.is_given_numbers and is_ruled:  # of losses, of which the rule tells
            continue
        # For a log of a layer's, the full batch is too much: it has all its activations.
        tell = model._warn_once if metric.is_given_numbers else losses.tell
        tell(message(f"the metric {metric.name!r}", metric.place))
    for metric_of_samples, made_by in _worked_over(calls, of_losses, numbers):
        losses.tell(message(f"the metric {metric_of_samples.name!r}", made_by))
    results = [result for result, *_ in calls.results]
    is_read = isinstance(recording.logs, dict) and not is_ruled
    for name, value in recording.logs.items() if is_read else ():
        if keras.ops.is_tensor(value) and not is_in(value, results):
            place = numbers.place_of(value)
            if place is None and not keras.backend.is_float_dtype(value.dtype):
                place = numbers.place_of_integer(value)
            if place is not None:
                model._warn_once(message(f"the log {name!r}", place))


class _OfBatches(NamedTuple):
    """A metric that averages a number over batches.

    Attributes:
        name: of the metric.
        place: what the number is made by.
        is_given_numbers: whether the step, or a layer, gives it the number.
    """

    name: str
    place: str
    is_given_numbers: bool


class _Numbers(NamedTuple):
    """What metrics and logs get while a step is drawn.

    Attributes:
        waiting: returns the numbers that wait for the full batch, of a metric.
        written: returns what is written to variables.
        losses: what is known of the step's losses.
        is_weighted: whether numbers that wait have the weights that they ask for. Else, where the
            step will run eagerly, they count as means over samples.
    """

    waiting: Callable[[Any], list[Any]]
    written: Callable[[Any], list[Any]]
    losses: StepLosses
    is_weighted: bool

    def place_of(self, value: Any) -> str | None:
        """Return by what a number that waits is made, if it is no mean or sum over samples."""
        loss = self._read(value)
        if loss.obstacle is not None and loss.obstacle.why in _BREAKS:
            as_loss = self.losses.heard.read(value).obstacle  # through which gradients flow
            is_told = as_loss is not None and is_in(as_loss.op, self.losses.told)
            return None if is_told else self._place_unless_told(loss.obstacle)
        kinds = _kinds_of(loss)
        if len(kinds) > 1 and not kinds <= self.losses.told_kinds:
            return "terms that are divided by different things"
        if not self.is_weighted and not all(map(_is_of_sizes, kinds)):
            return "a sum, or a mean over some of the samples, with `run_eagerly=True`"
        return None

    def place_of_samples(self, value: Any) -> str | None:
        """Return by what a metric's argument is made that does not follow sample by sample."""
        loss = self._read(value)
        obstacle = loss.obstacle
        if obstacle is not None and (obstacle.why != UNKNOWN or obstacle.op.type in OPAQUE):
            return self._place_unless_told(obstacle)
        is_reduced = not loss.is_by_sample and bool(_kinds_of(loss))
        return place_of(value.op) if is_reduced else None

    def place_of_integer(self, value: Any) -> str | None:
        """Return by what an integer is made, if it is no sum over samples."""
        return "a mean of integers" if _kinds_of(self._read(value)) - {OF_SUM.kind} else None

    def places_of_written(self, variables: Sequence[Any]) -> list[str | None]:
        """Return by what values are made that a metric writes, where they do not add up."""
        found: list[str | None] = []
        for variable in variables:
            values = self.written([variable])
            is_added = any(value.dtype == "resource" for value in values)  # by the operation
            found += [self._place_of_written(value, is_added) for value in values]
        return found

    def _place_of_written(self, value: Any, is_added: bool) -> str | None:
        added = added_to_variable(value)
        loss = self._read(value if added is None else added)
        if loss.obstacle is not None and loss.obstacle.why in _BREAKS:
            made_by = getattr(loss.obstacle.op, "type", None)
            is_extreme = (made_by, getattr(value.op, "type", None)) in _EXTREMES
            return None if is_extreme else self._place_unless_told(loss.obstacle)
        if added is not None and loss.denominators == [] and number_of(added):
            return "a count of batches"
        kinds = _kinds_of(loss)
        if kinds and not is_added and not adds_to_variable(value):
            return "a value that replaces that of the batch before"
        return "a mean over samples" if kinds - {OF_SUM.kind} else None

    def _read(self, value: Any) -> StepLoss:
        return self.losses.heard.read(value, of_values=True)

    def _place_unless_told(self, obstacle: Obstacle) -> str | None:
        return None if is_in(obstacle.op, self.losses.told) else place_of(obstacle.op)


def _of_batches(
    metrics: Sequence[Any], others: Sequence[Any], numbers: _Numbers
) -> list[_OfBatches]:
    """Return metrics that average a number over batches, as the graph of a step tells.

    Args:
        metrics: of the model.
        others: of these, those that are not to be looked at.
        numbers: what they get.
    """
    found = []
    for metric in (part for whole in metrics for part in parts_of(whole)):
        is_given_numbers = type(metric) in (keras.metrics.Mean, keras.metrics.Sum)
        waiting = numbers.waiting(metric)
        is_counting = counts_samples(metric) and not (is_given_numbers or waiting)
        if is_in(metric, others) or is_counting:
            continue
        places = [numbers.place_of(value) for value in waiting]
        if not waiting:
            places = numbers.places_of_written(metric.variables)
        place = next(filter(None, places), None)
        if place is not None:
            found.append(_OfBatches(metric.name, place, is_given_numbers))
    return found


def _worked_over(
    calls: MetricCalls, others: Sequence[Any], numbers: _Numbers
) -> Iterator[tuple[Any, str]]:
    """Yield metrics that do not get samples one by one, and by what.

    Args:
        calls: what the step gave to metrics.
        others: metrics that are not to be looked at.
        numbers: what is known of these.
    """
    for metric in unique(calls.resets):
        yield metric, "`reset_state`, which the step calls"
    waiting = [update.metric for update in calls.updates]
    for metric, tensors in calls.given:
        if is_in(metric, [*others, *calls.resets]):
            continue
        given = [t for t in tensors if t.shape.rank != 0 or not is_in(metric, waiting)]
        place = next(filter(None, map(numbers.place_of_samples, given)), None)
        if place is not None:
            yield metric, place


def _kinds_of(loss: StepLoss) -> set[Any]:
    return {d.kind for d in loss.denominators or ()} - {OF_WEIGHTS.kind}


def _is_of_sizes(kind: Any) -> bool:
    """Return whether a mean is over all samples, or over all entries of these."""
    return bool(kind == "rows" or kind[0] == "entries")
