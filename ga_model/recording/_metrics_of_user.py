"""Which metrics of a model compute with code that is not Keras's."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base._identity import unique
from ga_model.base._internals import is_along_samples
from ga_model.recording._losses_of_keras import compares_samples
from ga_model.recording._models import instances_in
from ga_model.recording._stand_ins import original_of


def parts_of(metric: Any) -> list[Any]:
    """Return the metrics that one of a model's `metrics` consists of, those held by it last."""
    metric = original_of(metric)
    if type(metric).__name__ == "CompileMetrics":
        return [part for inner in metric.metrics for part in parts_of(inner)]
    held = instances_in(vars(metric), keras.metrics.Metric)
    return unique([metric, *(part for inner in held for part in parts_of(inner))])


def is_of_user(value: Any) -> bool:
    """Return whether a value is a function, or is called like one, that is not Keras's."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return callable(value) and not module.startswith("keras.")


def counts_samples(metric: Any) -> bool:
    """Return whether a metric is one of Keras's own that counts what it gets of each sample."""
    parts = [original_of(metric), *parts_of(metric)]
    if any(map(is_along_samples, parts)):
        return False
    held = [value for part in parts for value in vars(part).values()]
    # Losses reduce what they compute to one number.
    is_of_others = any(
        is_of_user(value) or isinstance(value, keras.losses.Loss) or compares_samples(value)
        for value in held
    )
    return all(type(part).__module__.startswith("keras.") for part in parts) and not is_of_others
