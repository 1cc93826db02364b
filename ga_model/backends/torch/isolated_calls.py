"""Run layer calls in isolation, for trials: on other values, and without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import keras
import numpy as np
import torch

from ga_model.backends.torch.call_hooks import noting_hooks
from ga_model.backends.torch.layer_calls import autocast_scopes, gradients_of, parameters_beside
from ga_model.backends.torch.noting import Noting
from ga_model.backends.torch.state import TensorSnapshot, preserving_random_state
from ga_model.base._internals import raw
from ga_model.base._internals_torch import function_of
from ga_model.core.call_types import IsolatedCall
from ga_model.core.proof import calls
from ga_model.core.proof.calls import NotByRowsError
from ga_model.core.proof.noted import Draws

_LIBRARIES = ("torch.", "ga_model.")


def run_isolated(
    call: IsolatedCall, with_gradients: bool = False
) -> Callable[..., list[np.ndarray]]:
    """Return a function that runs a call on other values: see `Backend.run_isolated`.

    New samples are in the range of those that they replace, as they may be indices into tables.
    Gradients (of samples and trained tensors) are empty unless a custom gradient is found.
    """
    function, layer, fixed, samples = call
    limits = [_limits_of(tensor) for tensor in samples]
    state = {id(t): t for t in (*layer.parameters(), *map(raw, layer.variables))}
    leaves = [t if id(t) in state else t.detach().requires_grad_(t.requires_grad) for t in fixed]

    def run(
        values: list[np.ndarray], arrays: list[np.ndarray], begin: int, end: int
    ) -> list[np.ndarray]:
        parts = [
            _within(torch.as_tensor(array[begin:end]), limit).to(tensor.device)
            for array, limit, tensor in zip(arrays, limits, samples)
        ]
        with (
            preserving_random_state(),
            autocast_scopes()(),
            _without_saving_hooks(),
            _exchanged(state, zip(leaves, values)),
            noting_hooks() as hooks,
            torch.set_grad_enabled(with_gradients),
        ):
            kept = TensorSnapshot(layer)
            try:
                if with_gradients:
                    parts = [part.requires_grad_(part.is_floating_point()) for part in parts]
                with Noting(Draws(end - begin, calls.TOTAL, begin, begin)):
                    outputs = function(leaves, parts)
                if changed := kept.written(by_value=True):
                    raise NotByRowsError(f"it writes to {changed} in each call")
                if with_gradients:
                    if hooks:
                        text = "its tensors have hooks, which would see each microbatch"
                        raise NotByRowsError(text)
                    others = parameters_beside(layer, leaves)
                    sources = [t for t in (*parts, *leaves, *others) if t.requires_grad]
                    outputs = _isolated_gradients(outputs, sources)
            finally:
                kept.restore()
            return [keras.ops.convert_to_numpy(output) for output in outputs]

    return run


def _isolated_gradients(
    outputs: list[torch.Tensor], sources: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return gradients of half the sum of squares, or none if no custom gradient is involved."""
    if not has_custom_gradients(outputs, sources):
        return []
    pairs = [(output, output.detach()) for output in outputs if output.requires_grad]
    gradients = zip(gradients_of(pairs, sources, create_graph=False), sources)
    dtype = pairs[0][0].dtype
    return [(torch.zeros_like(t) if g is None else g).to(dtype) for g, t in gradients]


def has_custom_gradients(results: list[torch.Tensor], sources: list[torch.Tensor]) -> bool:
    """Return whether a custom `torch.autograd.Function` was used to compute results.

    Raises:
        NotByRowsError: the results depend on something other than the sources.
    """
    results = [result for result in results if result.requires_grad]
    leaves = [result for result in results if result.grad_fn is None]
    nodes, has_custom = [t.grad_fn for t in results if t.grad_fn is not None], False
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaves += [node.variable] if hasattr(node, "variable") else []
        module = getattr(function_of(node), "__module__", "torch")
        has_custom |= not f"{module}.".startswith(_LIBRARIES)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        nodes += new
    known = set(map(id, sources))
    if any(id(leaf) not in known for leaf in leaves):
        text = "it uses a tensor or variable that is neither its input nor its weight"
        raise NotByRowsError(text)
    return has_custom


def _limits_of(tensor: torch.Tensor) -> tuple[float, float] | None:
    """Return the minimum and maximum of a floating-point tensor, if they differ and are finite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = (float(limit) for limit in tensor.detach().aminmax())
    return (low, high) if 0.0 < high - low < np.inf else None


def _within(tensor: torch.Tensor, limits: tuple[float, float] | None) -> torch.Tensor:
    if limits is None:
        return tensor
    low, high = limits
    return low + torch.remainder(tensor - low, high - low)


@contextmanager
def _exchanged(
    state: dict[int, torch.Tensor], pairs: Iterable[tuple[torch.Tensor, np.ndarray]]
) -> Iterator[None]:
    """Give the tensors of a state other values in a block, in other memory.

    So results computed from them stay valid. Tensors without a pair get random numbers.
    """
    values = {id(tensor): value for tensor, value in pairs}
    generator = np.random.default_rng(0)
    before = [(tensor, tensor.data) for tensor in state.values()]
    try:
        for tensor, data in before:
            value = values.get(id(tensor))
            if value is None:
                value = calls.drawn(tensor.dtype, tuple(tensor.shape), generator, 0.3)
            tensor.data = torch.as_tensor(value).to(data.device, data.dtype)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _without_saving_hooks() -> AbstractContextManager[None]:
    """Return a context without hooks on saved tensors, which `torch.utils.checkpoint` counts."""
    return torch.autograd.graph.saved_tensors_hooks(  # type: ignore[no-any-return]
        lambda tensor: tensor, lambda tensor: tensor
    )
