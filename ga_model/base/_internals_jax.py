"""Private names of Keras where it runs on JAX: see `_internals`. Imports no JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# The methods of a model that only on JAX make its step, and what it logs.
MORE_METHODS_OF_STEP = (
    "compute_loss_and_updates",
    "stateless_call",
    "stateless_compute_loss",
    "_update_metrics_variables",
)


def put_values_back(model: Any) -> None:
    """Let the variables of a model have their values, which are elsewhere in `fit` on JAX."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


def leave_values(model: Any, values: Iterable[Any]) -> None:
    """Let Keras put values back to the variables of a model, after a step on JAX that failed.

    Args:
        model: the model.
        values: as `train_step` takes them, before the step.
    """
    groups = ["trainable", "non_trainable", "optimizer", "metrics"]
    found = {f"{name}_variables": list(group) for name, group in zip(groups, values)}
    if not any(value.is_deleted() for group in found.values() for value in group):
        model._jax_state, model._jax_state_synced = found, False


@contextlib.contextmanager
def jax_state_of(model: Any) -> Iterator[tuple[list[list[Any]], Callable[[Any], None]]]:
    """Get the values of a model's variables on JAX, as `train_step` takes them.

    Yields:
        The values, and a function that writes new ones to the variables.
    """
    put_values_back(model)
    groups = [
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    ]

    def put(values: Any) -> None:
        for variables, new in zip(groups, values):
            for variable, value in zip(variables, new):
                variable.assign(value)

    yield [[variable.value for variable in group] for group in groups], put
