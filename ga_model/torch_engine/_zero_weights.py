"""Trials with weights that are all zero exchanged for others.

What lies behind a head, a scale or an adapter that starts at zero changes no output and gets no
gradient, so a trial at the start would see nothing of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ga_model.base._internals import raw


def zero_weights(variables: Iterable[Any]) -> list[Any]:
    """Return the weights of variables that are all zero."""
    weights = [raw(v) for v in variables]
    return [w for w in weights if w.is_floating_point() and w.numel() and not bool(w.any())]


@contextlib.contextmanager
def exchanged(weights: list[Any]) -> Iterator[None]:
    """Give weights other values in a block, in other memory: what was computed stays valid."""
    before = [weight.data for weight in weights]
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        weight.data = _values_like(weight, generator)
    try:
        yield
    finally:
        for weight, data in zip(weights, before):
            weight.data = data


def _values_like(weight: Any, generator: torch.Generator) -> Any:
    """Return numbers of both signs and about one size, smaller where more of them are summed."""
    shares = 2.0 * torch.rand(weight.shape, generator=generator) - 1.0
    numbers = torch.sign(shares) * (0.5 + 0.5 * shares.abs())
    size = math.sqrt(math.prod(weight.shape[:-1]))
    return (numbers / size).to(weight.device, weight.dtype)
