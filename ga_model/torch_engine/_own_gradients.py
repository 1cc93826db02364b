"""Custom gradients of layers (`torch.autograd.Function`).

The gradients of a loss are linear in what is passed back through its operations, so microbatches
can be weighed. A custom rule need not be: one that clips what it gets clips other values of a
microbatch than of the full batch. Whether it is linear is tried, with values of several sizes. Nor
need it be separate for each sample: that is tried with values of half of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ga_model.base._internals_torch import function_of, results_of, takes_leaf
from ga_model.torch_engine._not_known import otherwise

_FACTORS = (1e-6, 1e-3, 1.0, 1e3)
_LIBRARIES = ("torch.", "keras.", "ga_model.")


def nodes_of(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield the operations that tensors come from, as PyTorch's autograd has them."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new


@otherwise("(not analyzed)")
def not_linear(tensors: Iterable[Any], rows: int) -> str | None:
    """Return the name of the first function whose gradient is not linear and separate, or None.

    Args:
        tensors: that come from functions.
        rows: samples that they are of.
    """
    for node in nodes_of(tensors):
        function = function_of(node)
        if function is None or f"{function.__module__}.".startswith(_LIBRARIES):
            continue
        of_weight = takes_leaf(node)  # which has no samples
        if not _has_linear_gradient(node, function, None if of_weight else rows):
            return str(function.__name__)
    return None


def _has_linear_gradient(node: Any, function: Any, rows: int | None) -> bool:
    def pass_back(upstream: list[Any]) -> list[Any]:
        found = function.backward(node, *upstream)
        found = found if isinstance(found, tuple) else (found,)
        return [gradient for gradient in found if gradient is not None]

    return is_linear(pass_back, results_of(node), rows)


@otherwise(False)  # of the user's code, called in a way that it may not know
def is_linear(
    pass_back: Callable[[list[Any]], list[Any]], results: list[Any], rows: int | None = None
) -> bool:
    """Return whether gradients grow as what they are computed of, and are separate for samples.

    Args:
        pass_back: takes gradients of results, and returns others.
        results: what has the shapes, dtypes and devices of these.
        rows: samples, if there are any.
    """
    generator = torch.Generator().manual_seed(0)
    upstream = [
        torch.randn(tuple(part.shape), generator=generator).to(part.device, part.dtype)
        for part in results
    ]
    with torch.no_grad():
        found = [
            [g / factor for g in pass_back([u * factor for u in upstream])] for factor in _FACTORS
        ]
        mixes = rows is not None and _mixes_samples(pass_back, upstream, rows)
    if mixes:
        return False
    halves = (torch.float16, torch.bfloat16)
    tolerance = 5e-2 if any(g.dtype in halves for g in upstream) else 1e-3
    return all(
        torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().max()))
        for others in found[1:]
        for one, other in zip(found[0], others, strict=True)
        if one.numel()
    )


def _mixes_samples(
    pass_back: Callable[[list[Any]], list[Any]], upstream: list[Any], rows: int
) -> bool:
    """Return whether gradients of samples are computed of those of others."""
    half = rows // 2
    if not half or any(u.shape[:1] != (rows,) for u in upstream):
        return False
    of_others = [u.clone() for u in upstream]
    for u in of_others:
        u[half:] = 0.0
    found = [g for g in pass_back(of_others) if g.shape[:1] == (rows,)]
    return any(bool((g[half:].abs() > 1e-5 * g.abs().max()).any()) for g in found)
