"""Metrics that are given one number of a batch, such as its Dice coefficient.

A metric that counts what it gets of each sample has counted the same when all microbatches are
through. One that averages a number over the batches that it sees has averaged other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from ga_model.base._identity import is_in
from ga_model.hearing._code_of_user import counts_samples, parts_of
from ga_model.reading._denominators import NOT_LINEAR, OF_SUM, OF_WEIGHTS, SEVERAL, StepLoss
from ga_model.reading._heard_gradients import place_of


class OfBatches(NamedTuple):
    """A metric that averages a number over batches.

    Attributes:
        name: of the metric.
        place: what the number is made by.
        is_of_layer: whether a layer gives it the number.
    """

    name: str
    place: str
    is_of_layer: bool


class MetricValues(NamedTuple):
    """What metrics get while a step is drawn.

    Attributes:
        waiting: returns the numbers that wait for the full batch, of a metric.
        written: returns what is written to variables.
        read: returns what a tensor is divided by.
        is_weighted: whether numbers that wait have the weights that they ask for. Else, where the
            step will run eagerly, they count as means over samples.
    """

    waiting: Callable[[Any], list[Any]]
    written: Callable[[Any], list[Any]]
    read: Callable[[Any], StepLoss]
    is_weighted: bool


def of_batches(
    metrics: Sequence[Any], others: Sequence[Any], given: MetricValues
) -> list[OfBatches]:
    """Return metrics that average a number over batches, as the graph of a step tells.

    Args:
        metrics: of the model.
        others: of these, those that are not to be looked at.
        given: what they get.
    """
    found = []
    for metric in (part for whole in metrics for part in parts_of(whole)):
        is_given_numbers = type(metric) in (keras.metrics.Mean, keras.metrics.Sum)
        if is_in(metric, others) or (counts_samples(metric) and not is_given_numbers):
            continue
        is_of_function = isinstance(metric, keras.metrics.MeanMetricWrapper)
        breaks = (NOT_LINEAR, SEVERAL) if is_of_function else (NOT_LINEAR,)
        waiting = given.waiting(metric)
        losses = [given.read(value) for value in waiting or given.written(metric.variables)]
        obstacles = [loss.obstacle for loss in losses]
        places = [place_of(o.op) for o in obstacles if o is not None and o.why in breaks]
        for loss in losses:
            kinds = {d.kind for d in loss.denominators or ()} - {OF_WEIGHTS.kind}
            if waiting and len(kinds) > 1:
                places.append("terms that are divided by different things")
            elif waiting and not given.is_weighted and not all(map(_is_of_sizes, kinds)):
                places.append("a sum, or a mean over some of the samples, with `run_eagerly=True`")
            elif not waiting and kinds - {OF_SUM.kind}:
                places.append("a mean over samples")
        if places:
            found.append(OfBatches(metric.name, places[0], is_given_numbers))
    return found


def _is_of_sizes(kind: Any) -> bool:
    """Return whether a mean is over all samples, or over all entries of these."""
    return bool(kind == "rows" or kind[0] == "entries")
