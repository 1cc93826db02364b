"""Explain why accumulation differs from the full batch, beyond the warnings of accumulation."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base._internals import layers_in
from ga_model.check._equivalence_report import EquivalenceReport


def reasons(model: Any, report: EquivalenceReport) -> list[str]:
    """Return sentences on why the trainings of a report differ, the warnings first."""
    found = [*report.reasons, *_of_structure(model, report)]
    if found or not report.is_finite:
        return found
    if model._has_rule():
        return [
            "The model has a `microbatch_weight` of its own, with which nothing is tried. If you "
            "override `microbatch_weight`, it must return what the loss is divided by, or 'sum'; "
            "without it, the weight is found."
        ]
    return [
        "The first samples, on which the step was tried at once and in parts, do not show what "
        "differs: it depends on the samples. With `microbatch_size` alone and `loss_over='batch'`, "
        "the step runs once per update, and sees the full batch."
    ]


def _of_structure(model: Any, report: EquivalenceReport) -> list[str]:
    found = []
    if report.random_layers.left:
        found.append(
            f"The layers {report.random_layers.left} draw random numbers that two trainings cannot "
            "share. For the check, set their noise to zero, or let their `call` take `training` "
            "and draw only if it is True."
        )
    if not any(variable.is_moved_weight for variable in report.variables):
        found.append(
            "The full batch changes no weight, so there is nothing to compare. Use a larger "
            "learning rate, unfreeze a layer, or compare more updates."
        )
    elif report.is_finite and report.verdict == "undecided" and not report.random_layers.left:
        is_on_others = keras.backend.backend() != "tensorflow"
        more_exact = _ON_TENSORFLOW if is_on_others else _IN_FLOAT64
        found.append(
            f"Rounding alone changes the result of plain Keras by as much. {more_exact} If that "
            "does not help, the step draws random numbers without a `keras.random.SeedGenerator`."
        )
    differing = {variable.path for variable in report.variables if not variable.is_equal}
    changing = [
        layer.name
        for layer in layers_in(model, include_self=False)
        if any(variable.path in differing for variable in layer.non_trainable_weights)
        and not isinstance(layer, keras.layers.BatchNormalization)
    ]
    if changing and report.verdict == "different":
        found.append(
            f"The layers {changing} write to their weights in every forward pass: "
            "once per microbatch, but only once on the full batch."
        )
    return found


_IN_FLOAT64 = (
    "Check in float64: `keras.config.set_floatx('float64')`, "
    "`keras.config.set_dtype_policy('float64')`, and create the model again."
)
_ON_TENSORFLOW = (
    "Keras has no float64 on this backend: check with KERAS_BACKEND=tensorflow in float64, if the "
    "model trains there."
)
