"""The engine for PyTorch: what the first level needs from a backend."""

from __future__ import annotations

from typing import Any

from ga_model.torch_engine._hooks import Hooks
from ga_model.torch_engine._torch_accumulation import Accumulation

__all__ = ["Accumulation", "Hooks", "check_same_epoch", "explain"]


def check_same_epoch(model: Any, epoch: int) -> None:
    """Do nothing: there is one process."""


def explain(error: BaseException, model: Any) -> None:
    """Do nothing: there is one process."""
