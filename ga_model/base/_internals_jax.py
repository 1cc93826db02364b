"""Private names of Keras on JAX: see `_internals`. Does not import JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from ga_model.base._types import Tensor

# Methods of a model that are part of its step and logs on JAX only.
MORE_METHODS_OF_STEP = (
    "compute_loss_and_updates",
    "stateless_call",
    "stateless_compute_loss",
    "_update_metrics_variables",
)


def sync_variables(model: keras.Model) -> None:
    """Write the values that Keras keeps in arrays during `fit` on JAX to a model's variables."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def restore_variables(model: keras.Model, values: Mapping[Any, Iterable[Tensor]]) -> None:
    """Make Keras write values to the variables of a model after a failed step.

    Args:
        values: the values before the step, by `core.backend_types.Group`.
    """
    state = {f"{group}_variables": list(arrays) for group, arrays in values.items()}
    if not any(value.is_deleted() for group in state.values() for value in group):
        model._jax_state, model._jax_state_synced = state, False
