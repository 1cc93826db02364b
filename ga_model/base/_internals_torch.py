"""Private names of PyTorch: see `_internals`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

# Operations that draw for each entry of their parameters.
PRIVATE_DRAWS = {"_standard_gamma", "_sample_dirichlet"}


def name_of(operation: Any) -> str:
    """Return the name of an operation that a dispatch mode sees, as `aten::div` has it: "div"."""
    return str(operation._schema.name).removeprefix("aten::")


def function_of(node: Any) -> Any:
    """Return the `torch.autograd.Function` that made a node of PyTorch's autograd, or None."""
    return getattr(type(node), "_forward_cls", None)


def takes_leaf(node: Any) -> bool:
    """Return whether a node of PyTorch's autograd gets a tensor that it accumulates a gradient of,
    such as a weight."""
    names = (following.name() for following, _ in node.next_functions if following is not None)
    return any(name.endswith("AccumulateGrad") for name in names)


def results_of(node: Any) -> list[Any]:
    """Return the shape, dtype and device of what a node of PyTorch's autograd gave."""
    return list(node._input_metadata)


def divisor_of(node: Any) -> float | None:
    """Return the number by which a node of PyTorch's autograd divides what it gets, or None.

    Of means, that of the values; of a division, a number that no gradient goes to. A gradient that
    was taken may have freed it.
    """
    try:
        return _kept_divisor_of(node)
    except RuntimeError:  # "saved tensors after they have already been freed"
        return None


def _kept_divisor_of(node: Any) -> float | None:
    name = node.name()
    if name == "DivBackward0":
        other = node._saved_other
        is_number = other.numel() == 1 and node.next_functions[1][0] is None
        return float(other) if is_number else None
    if name in ("MeanBackward0", "MeanBackward1"):
        sizes = node._saved_self_sym_sizes
        axes = getattr(node, "_saved_dim", ()) or range(len(sizes))
        # Negative axes are kept as unsigned numbers of 64 bits.
        return float(math.prod(sizes[axis - 2**64 if axis >= 2**63 else axis] for axis in axes))
    if getattr(node, "_saved_reduction", None) != 1:  # a loss of PyTorch's that is a mean
        return None
    if hasattr(node, "_saved_total_weight"):
        return float(node._saved_total_weight)
    return float(node._saved_self.numel())


def left_out_by(node: Any) -> Any:
    """Return the operation whose result a node of PyTorch's autograd leaves out, or None.

    That is what `torch.where` does with one condition if it takes a constant instead, as Keras's
    `divide_no_nan` does.
    """
    if node.name() != "WhereBackward0":
        return None
    try:
        condition = node._saved_condition
    except RuntimeError:  # as in `divisor_of`
        return None
    if condition.numel() != 1:
        return None
    (if_true, _), (if_false, _) = node.next_functions
    taken, other = (if_true, if_false) if bool(condition) else (if_false, if_true)
    return other if taken is None else None


def divides_something(
    loss: Any, node: Any, left_out: tuple[Any, Any] | None, inputs: list[Any]
) -> bool:
    """Return whether what is divided adds to a gradient, had it been divided by a number.

    Args:
        loss: the tensor that the gradient is taken of.
        node: a node of PyTorch's autograd, that of a division by one number or of something else.
        left_out: None, or where that number is zero, the node whose result is left out, and the one
            that takes something else instead.
        inputs: tensors that the gradient is taken with respect to.
    """
    numerator, index = node.next_functions[0]
    if node.name() != "DivBackward0" or numerator is None:
        return False
    given = results_of(numerator)[index]
    if math.prod(given.shape) == 1:
        upstream = torch.ones(given.shape, dtype=given.dtype, device=given.device)
    else:
        last, instead = left_out or (node, node)
        upstream = _gradient(loss, None, instead)
        if upstream is not None:
            upstream = upstream.sum_to_size(results_of(last)[0].shape)
        if upstream is not None and last is not node:
            upstream = _gradient(torch.autograd.graph.GradientEdge(last, 0), upstream, node)
        if upstream is None:
            return False
        upstream = upstream.reshape(given.shape)
    edge = torch.autograd.graph.GradientEdge(numerator, index)
    found = torch.autograd.grad([edge], inputs, [upstream], retain_graph=True, allow_unused=True)
    gradients = [gradient for gradient in found if gradient is not None]
    return any(bool((g.isfinite() & (g != 0)).any()) for g in gradients)


def _gradient(result: Any, upstream: Any, node: Any) -> Any:
    """Return the gradient of a result with respect to what a node of PyTorch's autograd gave."""
    edge = torch.autograd.graph.GradientEdge(node, 0)
    (found,) = torch.autograd.grad(
        [result], [edge], [upstream], retain_graph=True, allow_unused=True
    )
    return found


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


@contextlib.contextmanager
def disabled(autocast: Any) -> Iterator[None]:
    """Let a `torch.autocast` cast nothing if it is entered in a block."""
    enabled, autocast._enabled = autocast._enabled, False
    try:
        yield
    finally:
        autocast._enabled = enabled


def norms_of(tensors: list[Any]) -> list[Any]:
    """Return the norm of each tensor of PyTorch, all of them at once."""
    with torch.no_grad():
        return list(torch._foreach_norm(tensors)) if tensors else []


def multiply(tensors: list[Any], factor: float) -> None:
    """Multiply tensors of PyTorch in place, all of them at once."""
    torch._foreach_mul_(tensors, factor)


def divide(tensors: list[Any], divisor: float) -> None:
    """Divide tensors of PyTorch in place, all of them at once."""
    torch._foreach_div_(tensors, divisor)
