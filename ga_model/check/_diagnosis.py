"""Explain why accumulation differs from the full batch, beyond the warnings of accumulation."""

from __future__ import annotations

import keras

from ga_model.base._internals import layers_in
from ga_model.check._equivalence_report import EquivalenceReport


def reasons(model: keras.Model, report: EquivalenceReport) -> list[str]:
    """Return sentences on why the trainings of a report differ, the warnings first."""
    sentences = [*report.reasons, *_structural_reasons(model, report)]
    if sentences or not report.is_finite:
        return sentences
    if model._overrides_microbatch_weight():
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


def _structural_reasons(model: keras.Model, report: EquivalenceReport) -> list[str]:
    sentences = []
    if report.random_layers.left:
        sentences.append(
            f"The layers {report.random_layers.left} draw random numbers that two trainings cannot "
            "share. For the check, set their noise to zero, or let their `call` take `training` "
            "and draw only if it is True."
        )
    if not any(variable.is_moved_weight for variable in report.variables):
        sentences.append(
            "The full batch changes no weight, so there is nothing to compare. Use a larger "
            "learning rate, unfreeze a layer, or compare more updates."
        )
    elif report.is_finite and report.verdict == "undecided" and not report.random_layers.left:
        lacks_float64 = keras.backend.backend() != "tensorflow"
        advice = _ON_TENSORFLOW if lacks_float64 else _IN_FLOAT64
        sentences.append(
            f"Rounding alone changes the result of plain Keras by as much. {advice} If that "
            "does not help, the step draws random numbers without a `keras.random.SeedGenerator`."
        )
    differing = {variable.path for variable in report.variables if not variable.is_equal}
    writing = [
        layer.name
        for layer in layers_in(model)[1:]
        if any(variable.path in differing for variable in layer.non_trainable_weights)
        and not isinstance(layer, keras.layers.BatchNormalization)
    ]
    if writing and report.verdict == "different":
        sentences.append(
            f"The layers {writing} write to their weights in every forward pass: "
            "once per microbatch, but only once on the full batch."
        )
    return sentences


_IN_FLOAT64 = (
    "Check in float64: `keras.config.set_floatx('float64')`, "
    "`keras.config.set_dtype_policy('float64')`, and create the model again."
)
_ON_TENSORFLOW = (
    "Keras has no float64 on this backend: check with KERAS_BACKEND=tensorflow in float64, if the "
    "model trains there."
)
