"""Metrics that are given one number of a batch, such as its Dice coefficient.

A metric that counts what it gets of each sample has counted the same when all microbatches are
through. One that averages a number over the batches that it sees has averaged other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from ga_model.base._identity import is_in
from ga_model.hearing._stand_in import original_of
from ga_model.reading._denominators import NOT_LINEAR, OF_SUM, OF_WEIGHTS, SEVERAL, StepLoss
from ga_model.reading._heard_gradients import place_of


def parts_of(metric: Any) -> list[Any]:
    """Return the metrics that one of a model's `metrics` consists of."""
    metric = original_of(metric)
    is_compiled = type(metric).__name__ == "CompileMetrics"
    return list(metric.metrics) if is_compiled else [metric]


def is_of_user(value: Any) -> bool:
    """Return whether a value is a function, or is called like one, that is not Keras's."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return callable(value) and not module.startswith("keras.")


def counts_samples(metric: Any) -> bool:
    """Return whether a metric is one of Keras's own that counts what it gets of each sample."""
    return all(
        type(part).__module__.startswith("keras.") and not any(map(is_of_user, vars(part).values()))
        for part in [metric, *parts_of(metric)]
    )


class OfBatches(NamedTuple):
    """A metric that averages a number over batches.

    Attributes:
        name: of the metric.
        place: what the number is made by.
        is_mean: whether the number is a mean over samples, whose average differs only where batches
            do in their numbers of samples.
        is_of_layer: whether a layer gives it the number.
    """

    name: str
    place: str
    is_mean: bool
    is_of_layer: bool


def of_batches(
    metrics: Sequence[Any],
    others: Sequence[Any],
    values_for: Callable[[Any], list[Any]],
    read: Callable[[Any], StepLoss],
) -> list[OfBatches]:
    """Return metrics that average a number over batches, as the graph of a step tells.

    Args:
        metrics: of the model.
        others: of these, those that are not to be looked at.
        values_for: returns what is written to variables.
        read: returns what a tensor is divided by.
    """
    found = []
    for metric in (part for whole in metrics for part in parts_of(whole)):
        is_given_numbers = type(metric) in (keras.metrics.Mean, keras.metrics.Sum)
        if is_in(metric, others) or (counts_samples(metric) and not is_given_numbers):
            continue
        is_of_function = isinstance(metric, keras.metrics.MeanMetricWrapper)
        breaks = (NOT_LINEAR, SEVERAL) if is_of_function else (NOT_LINEAR,)
        losses = [read(value) for value in values_for(metric.variables)]
        kinds = {d.kind for loss in losses for d in loss.denominators or ()}
        obstacles = [loss.obstacle for loss in losses]
        places = [o.op for o in obstacles if o is not None and o.why in breaks]
        if places or kinds - {OF_SUM.kind, OF_WEIGHTS.kind}:
            place = place_of(places[0]) if places else "a mean over samples"
            found.append(OfBatches(metric.name, place, not places, is_given_numbers))
    return found
