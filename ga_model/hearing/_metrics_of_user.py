"""Which metrics of a model compute with code that is not Keras's."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.hearing._stand_in import original_of


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
