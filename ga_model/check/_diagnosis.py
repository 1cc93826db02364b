"""Find out why accumulation differs from the full batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ga_model.base._internals import layers_in, takes_training
from ga_model.check._backend import backend
from ga_model.check._equivalence_report import EquivalenceReport
from ga_model.check._plan import Plan
from ga_model.recording._models import is_of_keras

# A relative difference of outputs, or of gradients with respect to them, that is no rounding.
_SIGNIFICANT = 1e-2


def reasons(model: Any, plan: Plan, report: EquivalenceReport) -> list[str]:
    """Return sentences that say why the trainings of `report` differ.

    What accumulation has warned of comes first. Where that is nothing, looks at the first window,
    at the weights that the trainings started from: do the outputs of a sample depend on the others,
    and is the gradient of the loss with respect to the outputs, up to a factor, that of each
    microbatch?
    """
    found = [*report.reasons, *_of_structure(model, report)]
    if found or not report.is_finite:
        return found
    return _of_first_window(model, plan)


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
        found.append(
            "Rounding alone changes the result of plain Keras by as much. "
            f"{backend.MORE_EXACT} If that does not "
            "help, the step draws random numbers without a `keras.random.SeedGenerator`."
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


def _of_first_window(model: Any, plan: Plan) -> list[str]:
    rows = min(plan.rows, plan.window_rows)
    whole = _Pass(model, plan.slice(0, rows))
    parts = [_Pass(model, plan.slice(*p)) for p in _places(rows, plan.microbatch_rows)]
    if whole.outputs is not None and _differs(whole.outputs, [part.outputs for part in parts]):
        return [
            "The outputs for one sample depend on the other samples of its batch. A layer uses "
            "statistics of the batch, or compares samples."
        ]
    if not is_of_keras(model, "train_step"):
        return [
            "The model has a custom `train_step`, which runs once per microbatch, with everything "
            "that it does besides computing gradients. With `microbatch_size` alone and "
            "`loss_over='auto'`, it runs once per update. An overridden `microbatch_weight` must "
            "return what the loss is divided by."
        ]
    if not whole.gradients:
        return []
    factors = []
    places = _places(rows, plan.loss_rows)
    if plan.loss_rows != plan.microbatch_rows:
        parts = [_Pass(model, plan.slice(*place)) for place in places]
    for part, (begin, end) in zip(parts, places):
        for of_whole, of_part in zip(whole.gradients, part.gradients or []):
            factor = _factor(of_whole[begin:end], of_part)
            if factor is None:
                return [
                    "The loss compares samples of a batch, or divides by a number that depends on "
                    "all of them: its gradient with respect to a sample's outputs differs between "
                    "the full batch and a microbatch. Such a loss "
                    'needs the full batch: use `microbatch_size` alone, with `loss_over="auto"`.'
                ]
            factors.append(factor)
    shares = ", ".join(f"{factor:.3g}" for factor in factors[: len(parts)])
    return [
        f"On the full batch, the gradients of the microbatches have the weights {shares}, but "
        "accumulation used different ones. What a loss averages over is read from its reduction, "
        "mask and sample weights. If a custom loss averages over something else, override "
        "`microbatch_weight`, or return one value per sample."
    ]


def _places(rows: int, size: int) -> list[tuple[int, int]]:
    """Return where the microbatches of this many samples begin and end."""
    return [(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


class _Pass:
    """A forward pass of some samples, and the gradient of the loss with respect to the outputs.

    Attributes:
        outputs: arrays, or None where the model cannot be called on `x`.
        gradients: arrays with the outputs' shapes, or None where they cannot be taken.
    """

    outputs: list[Any] | None = None
    gradients: list[Any] | None = None

    def __init__(self, model: Any, data: tuple[Any, Any, Any]) -> None:
        try:
            x, y, sample_weight = keras.tree.map_structure(backend.as_tensor, data)

            def loss_of(y_pred: Any) -> Any:
                return model.compute_loss(x, y, y_pred, sample_weight, training=True)

            training = {"training": True} if takes_training(model) else {}
            outputs = model(x, **training)
            self.outputs = [_array(a) for a in keras.tree.flatten(outputs)]
            gradients = backend.gradients(loss_of, outputs)
            self.gradients = [_array(g) for g in gradients if g is not None]
        except Exception:  # of the model's own code, called in a way that it may not know
            return


def _array(tensor: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(tensor))


def _differs(whole: Sequence[Any], parts: Sequence[Sequence[Any] | None]) -> bool:
    """Return whether outputs are not those of the microbatches, one after the other."""
    for i, value in enumerate(whole):
        own = [part[i] for part in parts if part]
        if value.ndim == 0 or any(part.shape[1:] != value.shape[1:] for part in own):
            return True
        joined = np.concatenate(own)
        if joined.shape != value.shape or _relative(joined, value) > _SIGNIFICANT:
            return True
    return False


def _factor(whole: Any, part: Any) -> float | None:
    """Return c so that `whole` is c times `part`, or None if there is no such number."""
    whole, part = whole.astype("float64"), part.astype("float64")
    square = float(np.vdot(part, part))
    factor = float(np.vdot(whole, part)) / square if square else 0.0
    return None if _relative(factor * part, whole) > _SIGNIFICANT else factor


def _relative(value: Any, reference: Any) -> float:
    error = float(np.linalg.norm(value.astype("float64") - reference))
    return error / (float(np.linalg.norm(reference)) or 1.0)
