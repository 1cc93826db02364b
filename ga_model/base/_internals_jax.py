"""Private names of Keras where it runs on JAX: see `_internals`. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# The methods that make a model's step and logs on JAX only.
MORE_METHODS_OF_STEP = (
    "compute_loss_and_updates",
    "stateless_call",
    "stateless_compute_loss",
    "_update_metrics_variables",
)


def put_values_back(model: Any) -> None:
    """Write the values that Keras holds during `fit` on JAX to the variables of a model."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def leave_values(model: Any, values: Mapping[Any, Iterable[Any]]) -> None:
    """Make Keras write values to the variables of a model after a step on JAX that failed.

    Args:
        values: those before the step, by `core.backend_types.Group`.
    """
    found = {f"{group}_variables": list(of_group) for group, of_group in values.items()}
    if not any(value.is_deleted() for group in found.values() for value in group):
        model._jax_state, model._jax_state_synced = found, False
