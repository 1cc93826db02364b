"""The engine for JAX: what the first level needs from a backend."""

from __future__ import annotations

from typing import Any

from ga_model.jax_engine._jax_accumulation import Accumulation
from ga_model.jax_engine._jax_hooks import Hooks

__all__ = ["Accumulation", "Hooks", "check_same_epoch", "explain"]


def check_same_epoch(model: Any, epoch: int) -> None:
    """Do nothing: there is one process."""


def explain(error: BaseException, model: Any) -> None:
    """Do nothing: there is one process."""
