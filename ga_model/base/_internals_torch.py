"""Private names of PyTorch: see `_internals`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

# Operations that draw for each entry of their parameters.
PRIVATE_DRAWS = {"_standard_gamma", "_sample_dirichlet"}
# The operation that Python gets the number of a tensor by.
READS_NUMBER = "_local_scalar_dense"


def name_of(operation: Any) -> str:
    """Return the name of an operation that a dispatch mode sees, as `aten::div` has it: "div"."""
    return str(operation._schema.name).removeprefix("aten::")


def function_of(node: Any) -> Any:
    """Return the `torch.autograd.Function` that made a node of PyTorch's autograd, or None."""
    return getattr(type(node), "_forward_cls", None)


def is_in_derivative() -> bool:
    """Return whether the operation that runs is one of a derivative that PyTorch has itself."""
    node = torch._C._current_autograd_node()
    return node is not None and function_of(node) is None


def times_written(tensor: Any) -> int:
    """Return a number that grows whenever a tensor of PyTorch is written to in place.

    Tensors of `torch.inference_mode` have none, and raise an error.
    """
    with contextlib.suppress(AttributeError, RuntimeError):
        return int(tensor._version)
    return 0


def hooks_on_gradient(tensor: Any) -> Any:
    """Return the hooks that a gradient of a tensor of PyTorch goes through: a dict, or None."""
    return tensor._backward_hooks


def has_hooks_on_sum(tensor: Any) -> bool:
    """Return whether hooks run when a leaf of PyTorch has got its gradient."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def has_hooks_on_calls(module: Any) -> bool:
    """Return whether hooks run before or after `forward` of a module of PyTorch."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_hooks_on_gradients(module: Any) -> bool:
    """Return whether gradients of what a module of PyTorch gets or gives go through hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def note_step(optimizer: Any) -> None:
    """Let schedulers of PyTorch know that an optimizer's `step` was called. They warn if not."""
    optimizer._opt_called = True


def buffers_of(module: Any) -> dict[str, Any]:
    """Return the tensors that a module of PyTorch keeps and does not train, by names."""
    buffers: dict[str, Any] = module._buffers
    return buffers
