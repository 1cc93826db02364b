"""Trials with weights exchanged for others.

What lies behind a head, a scale or an adapter that starts at zero changes no output and gets no
gradient, so a trial at the start would see nothing of it. And what errors of rounding in half
precision come to, in all that a model computes, shows where its weights have some.
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


def floats_in(layer: Any) -> list[Any]:
    """Return the weights of a layer that are floats."""
    return [weight for weight in layer.parameters() if weight.is_floating_point()]


@contextlib.contextmanager
def exchanged(weights: list[Any], rounding: float = 0.0) -> Iterator[None]:
    """Give weights other values in a block, in other memory: what was computed stays valid.

    Args:
        weights: tensors of floats.
        rounding: relative error that they have then, or 0.0: they have other values.
    """
    before = [weight.data for weight in weights]
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        weight.data = (
            _rounded(weight, generator, rounding) if rounding else _values_like(weight, generator)
        )
    try:
        yield
    finally:
        for weight, data in zip(weights, before):
            weight.data = data


def _rounded(weight: Any, generator: torch.Generator, error: float) -> Any:
    signs = torch.sign(torch.rand(weight.shape, generator=generator) - 0.5)
    return (weight.detach() * (1.0 + error * signs).to(weight.device)).to(weight.dtype)


def _values_like(weight: Any, generator: torch.Generator) -> Any:
    """Return numbers of both signs and about one size, smaller where more of them are summed."""
    shares = 2.0 * torch.rand(weight.shape, generator=generator) - 1.0
    numbers = torch.sign(shares) * (0.5 + 0.5 * shares.abs())
    size = math.sqrt(math.prod(weight.shape[:-1]))
    return (numbers / size).to(weight.device, weight.dtype)
