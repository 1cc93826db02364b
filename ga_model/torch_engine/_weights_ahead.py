"""What the terms of a compiled loss weigh in a batch, before its first microbatch trains."""

from __future__ import annotations

from typing import Any

import keras
import torch

from ga_model.base._internals import compiled_loss, takes_training
from ga_model.hearing import _weights
from ga_model.hearing._compiled_copy import copy_with
from ga_model.hearing._metric_calls import MetricCalls
from ga_model.hearing._models import unpack, unrecorded
from ga_model.hearing._split import Batch
from ga_model.torch_engine._not_known import otherwise
from ga_model.torch_engine._observer import observer_of
from ga_model.torch_engine._state import unchanged
from ga_model.torch_engine._terms import Probes


@otherwise(None)
def weights_ahead(model: Any, batch: Batch) -> list[float] | None:
    """Return what the terms of the compiled loss weigh in a batch: the model runs forward once.

    None where it fails.
    """
    compiled = compiled_loss(model)
    if compiled is None:
        return []
    totals: list[float] = []
    terms: list[_weights.Term] = []
    ahead = _Ahead(model._accumulation.probes)
    copy = copy_with(
        compiled,
        lambda entry, copy: observer_of(entry, copy, lambda: ahead),
        terms.append,
        MetricCalls(),
    )
    with torch.no_grad(), unrecorded(), unchanged(model), keras.StatelessScope():
        for index in range(batch.num_microbatches):
            x, y, sample_weight = unpack(batch.microbatch(index))
            terms.clear()
            y_pred = model(x, training=False) if takes_training(model) else model(x)
            for leaf in keras.tree.flatten(y_pred):  # whose operations tell what a loss divides by
                leaf.requires_grad_(leaf.is_floating_point())
            with torch.enable_grad():
                copy(y, y_pred, sample_weight)
            weights = [0.0 if term.weight is None else float(term.weight) for term in terms]
            totals = [a + b for a, b in zip(totals, weights)] if totals else weights
    return totals


class _Ahead:
    """The losses of a pass that looks ahead, without warnings."""

    is_first_of_window = True

    def __init__(self, probes: Probes) -> None:
        self.kind_of = probes.known_kind_of
        self.computes_itself = probes.is_known_to_compute_itself
