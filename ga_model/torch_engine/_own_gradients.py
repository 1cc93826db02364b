"""Custom gradients of layers (`torch.autograd.Function`).

The gradients of a loss are linear in what is passed back through its operations, so microbatches
can be weighed. A custom rule need not be: one that clips what it gets clips other values of a
microbatch than of the full batch. Whether it is linear is tried, with values of several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ga_model.base._internals_torch import function_of, results_of

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


def not_linear(tensors: Iterable[Any]) -> str | None:
    """Return the name of the first function whose gradient is not linear, or None."""
    for node in nodes_of(tensors):
        function = function_of(node)
        if function is None or f"{function.__module__}.".startswith(_LIBRARIES):
            continue
        if not _has_linear_gradient(node, function):
            return str(function.__name__)
    return None


def _has_linear_gradient(node: Any, function: Any) -> bool:
    def pass_back(upstream: list[Any]) -> list[Any]:
        found = function.backward(node, *upstream)
        found = found if isinstance(found, tuple) else (found,)
        return [gradient for gradient in found if gradient is not None]

    return is_linear(pass_back, results_of(node))


def is_linear(pass_back: Callable[[list[Any]], list[Any]], results: list[Any]) -> bool:
    """Return whether gradients grow as what they are computed of.

    Args:
        pass_back: takes gradients of results, and returns others.
        results: what has the shapes, dtypes and devices of these.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        upstream = [
            torch.randn(tuple(part.shape), generator=generator).to(part.device, part.dtype)
            for part in results
        ]
        with torch.no_grad():
            found = [
                [g / factor for g in pass_back([u * factor for u in upstream])]
                for factor in _FACTORS
            ]
    except Exception:  # of the user's code, called in a way that it may not know
        return False
    halves = (torch.float16, torch.bfloat16)
    tolerance = 5e-2 if any(g.dtype in halves for g in upstream) else 1e-3
    return all(
        torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().max()))
        for others in found[1:]
        for one, other in zip(found[0], others, strict=True)
        if one.numel()
    )
