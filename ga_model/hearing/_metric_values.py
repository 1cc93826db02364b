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

_SUMS = {OF_SUM.kind, OF_WEIGHTS.kind}


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
    parts = [original_of(metric), *parts_of(metric)]
    held = [value for part in parts for value in vars(part).values()]
    # Losses reduce what they compute to one number.
    is_of_others = any(is_of_user(value) or isinstance(value, keras.losses.Loss) for value in held)
    return all(type(part).__module__.startswith("keras.") for part in parts) and not is_of_others


class OfBatches(NamedTuple):
    """A metric that averages a number over batches.

    Attributes:
        name: of the metric.
        place: what the number is made by.
        is_alike: whether its log differs in windows only if batches do in their sizes, as far as is
            known: of a mean over samples, and of what a step or a layer gives to a `Mean`.
        is_of_layer: whether a layer gives it the number.
    """

    name: str
    place: str
    is_alike: bool
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
        values = values_for(metric.variables)
        losses = [read(value) for value in values]
        kinds = {d.kind for loss in losses for d in loss.denominators or ()} - _SUMS
        obstacles = [loss.obstacle for loss in losses]
        places = [o.op for o in obstacles if o is not None and o.why in breaks]
        is_sum = is_of_function and any(map(_is_of_number, values))
        if places or kinds or is_sum:
            what = "a mean over samples" if kinds else "a sum over samples"
            is_mean = kinds and all(map(_is_of_sizes, kinds))
            is_alike = is_given_numbers or bool(is_mean and not places)
            place = place_of(places[0]) if places else what
            found.append(OfBatches(metric.name, place, is_alike, is_given_numbers))
    return found


def _is_of_sizes(kind: Any) -> bool:
    """Return whether a mean is over all samples, or over all entries of these."""
    return bool(kind == "rows" or kind[0] == "entries")


def _is_of_number(value: Any) -> bool:
    """Return whether a `Mean` has added one number to what it had, and not one for each sample."""
    op = value.op
    while op.type in ("AddV2", "Cast", "Identity"):
        others = [tensor.op for tensor in op.inputs if tensor.op.type != "ReadVariableOp"]
        if len(others) != 1:
            return False
        op = others[0]
    return bool(op.type == "Sum" and op.inputs[0].shape.rank == 0)
