"""The state of PyTorch's own random numbers, of the CPU and of each GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def random_state() -> tuple[Any, list[Any]]:
    """Return the states of the CPU and of each GPU."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), on_gpus


def set_random_state(state: tuple[Any, list[Any]]) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def random_kept() -> AbstractContextManager[None]:
    """Return a context that restores the state at its end."""
    number = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return torch.random.fork_rng(range(number))  # type: ignore[no-any-return]


def seed_random(seed: int) -> None:
    """Seed all generators. `torch.manual_seed` is slow before GPUs are used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
