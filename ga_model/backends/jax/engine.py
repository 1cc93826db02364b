"""The engine for JAX: what the first level needs from a backend."""

from __future__ import annotations

from typing import Any

from ga_model._settings import Settings
from ga_model.backends.jax.adapter import JaxBackend
from ga_model.backends.jax.hooks import Hooks
from ga_model.core.driver import Driver

__all__ = ["Accumulation", "Hooks", "check_same_epoch", "explain"]


class Accumulation(Driver):
    """All that is kept for a model where Keras runs on JAX.

    Args:
        model, settings: as `ModelState` takes them.
    """

    backend: JaxBackend

    def __init__(self, model: Any, settings: Settings) -> None:
        super().__init__(model, settings, JaxBackend(model))


def check_same_epoch(model: Any, epoch: int) -> None:
    """Do nothing: there is one process."""


def explain(error: BaseException, model: Any) -> None:
    """Do nothing: there is one process."""
