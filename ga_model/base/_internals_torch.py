"""Private names of PyTorch: see `_internals`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# Operations that draw a random number for each entry of their parameters.
PRIVATE_DRAWS = {"_standard_gamma", "_sample_dirichlet"}
# The operation behind `tensor.item()`.
READS_NUMBER = "_local_scalar_dense"


def name_of(operation: torch._ops.OpOverload) -> str:
    """Return the name of an operation of a dispatch mode, such as "div" for `aten::div`."""
    return str(operation._schema.name).removeprefix("aten::")


def function_of(node: torch.autograd.graph.Node) -> type[torch.autograd.Function] | None:
    """Return the `torch.autograd.Function` that created an autograd node, or None."""
    return getattr(type(node), "_forward_cls", None)


def is_in_derivative() -> bool:
    """Return whether the current operation belongs to one of PyTorch's own backward functions."""
    node = torch._C._current_autograd_node()
    return node is not None and function_of(node) is None


def times_written(tensor: torch.Tensor) -> int:
    """Return a counter that grows with each in-place write to a tensor."""
    with contextlib.suppress(RuntimeError):  # tensors of `torch.inference_mode` have no counter
        return int(tensor._version)
    return 0


def hooks_on_gradient(tensor: torch.Tensor) -> dict[int, Callable[..., Any]] | None:
    """Return the dict of hooks on the gradient of a tensor, or None."""
    return tensor._backward_hooks  # type: ignore[no-any-return]


def has_hooks_on_sum(tensor: torch.Tensor) -> bool:
    """Return whether hooks run after the gradient of a leaf tensor is accumulated."""
    return bool(tensor._post_accumulate_grad_hooks)


def has_hooks_on_calls(module: torch.nn.Module) -> bool:
    """Return whether hooks run before or after `forward` of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_hooks_on_gradients(module: torch.nn.Module) -> bool:
    """Return whether a module has backward hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer's `step` as called, so that learning-rate schedulers do not warn."""
    optimizer._opt_called = True


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module by name."""
    buffers: dict[str, torch.Tensor] = module._buffers
    return buffers
