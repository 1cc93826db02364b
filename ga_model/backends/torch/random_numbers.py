"""The state of PyTorch's own random numbers, of the CPU and of each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def random_kept() -> Iterator[None]:
    """Restore the state after a block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def seed_random(seed: int) -> None:
    """Seed all generators. `torch.manual_seed` is slow before GPUs are used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
