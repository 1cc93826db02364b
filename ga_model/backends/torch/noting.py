"""Record the scalars that running code divides by, and choose the random numbers it draws.

A dispatch mode sees the operations of the unchanged code, below autograd. Unknown operations run as
they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ga_model.backends.torch.state import preserving_random_state, seed_random
from ga_model.base._context import is_package_code
from ga_model.base._internals_torch import PRIVATE_DRAWS, READS_NUMBER, is_in_derivative, name_of
from ga_model.base._types import Nest, Scalar
from ga_model.core.proof.noted import Draws, Noted

# Indices of the arguments that operations divide by, or bound a divisor with: `x / maximum(n, 1)`.
_DIVIDING: dict[str, Sequence[int]] = {
    **dict.fromkeys(("div", "div_"), (1,)),
    **dict.fromkeys(("reciprocal", "reciprocal_", "pow", "pow_"), (0,)),
    **dict.fromkeys(("clamp", "clamp_", "clamp_min", "clamp_min_", "maximum", "fmax"), (0, 1)),
    "where": (1, 2),
}
_BOUNDING = {"clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "where"}
# Operations that draw each entry of their result, from parameters of that entry.
_BY_ENTRY = {"rand", "randn", "normal", "randint", "bernoulli", "poisson", "multinomial"}
_BY_ENTRY |= {"rand_like", "randn_like", "randint_like", "native_dropout", "rrelu_with_noise"}
_BY_ENTRY |= {"binomial", *PRIVATE_DRAWS}


class Noting(TorchDispatchMode, Noted):
    """Records scalars while it is entered, also how many entries a boolean mask selects."""

    def __init__(self, draws: Draws | None) -> None:
        TorchDispatchMode.__init__(self)
        Noted.__init__(self, draws)

    def run(self, function: Callable[..., Nest], arguments: tuple[Nest, ...]) -> Nest:
        with self:
            return function(*arguments)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name, draws, may_divide = _about(func)
        if draws and self._draws is not None:
            return _drawn(self._draws, name, func, args, kwargs)
        outputs = func(*args, **kwargs)
        if isinstance(outputs, torch.Tensor):
            self.dtypes.add(outputs.dtype)
        if not may_divide or is_package_code.get():
            return outputs
        for value in _divisors_of(name, args, outputs):
            # A Python number in the backward pass; if not from shapes, the forward recorded it.
            is_backward = is_in_derivative()
            is_of_shapes = isinstance(args[-1], (int, float)) and is_backward
            # Bounds have constants, and a backward pass contains the weight of the microbatch.
            is_watched = torch.is_tensor(value) and not is_backward and name not in _BOUNDING
            self.note(name, value, is_of_shapes, is_watched)
        return outputs


@functools.cache
def _about(func: Any) -> tuple[str, bool, bool]:
    """Return the name of an operation, whether it draws, and whether it may divide or bound."""
    name = name_of(func)
    may_divide = name in _DIVIDING or name in _BOUNDING or name.startswith("nll_loss")
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return name, draws, may_divide or name in (READS_NUMBER, "masked_select", "index")


def _divisors_of(name: str, args: tuple[Any, ...], outputs: Nest) -> Iterator[Scalar]:
    for place in _DIVIDING.get(name, ()):
        value: Any = args[place] if place < len(args) else None
        if torch.is_tensor(value) and value.ndim == 0 and value.dtype != torch.bool:
            yield value.detach().clone() if value.is_floating_point() else value.double()
        elif isinstance(value, (int, float)) and place == 1 and name != "where":
            yield float(value)
    if name in _BOUNDING and torch.is_tensor(outputs) and not outputs.ndim:
        yield outputs.detach().clone()
    if name == READS_NUMBER and args[0].dtype == torch.bool:
        yield float(outputs)  # code may branch on it
    if name.startswith("nll_loss") and name.endswith("forward"):
        yield outputs[1].detach()  # the total weight that it averages over
    if name == "masked_select" or (name == "index" and any(map(_is_mask, args[1]))):
        yield float(outputs.shape[0])


def _is_mask(index: Any) -> bool:
    return torch.is_tensor(index) and index.dtype in (torch.bool, torch.uint8)


def _drawn(
    draws: Draws,
    name: str,
    func: Callable[..., Nest],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Nest:
    """Run a random operation so that a sample gets the same numbers wherever it is in a batch."""
    kwargs = {key: None if key == "generator" else value for key, value in kwargs.items()}
    number, shape = draws.next_seed(), _shape_of(args, kwargs)
    kind = draws.kind_of(shape) if name in _BY_ENTRY or name.endswith("_") else "by batch"

    def run(seed: int, row: int | None = None) -> Nest:
        seed_random(1_000_003 * number + seed)
        if row is None:
            return func(*args, **kwargs)
        part = [_row(value, row, shape[0]) for value in args]
        return func(*part, **{key: _row(value, row, shape[0]) for key, value in kwargs.items()})

    with preserving_random_state():
        if kind == "by batch":
            return run(1009 * (1 + int(draws.run)))
        begin, step = (int(draws.begin), 1) if kind == "by sample" else (0, 0)
        rows = [run(begin + step * row, row) for row in range(shape[0])]
    if name.endswith("_"):  # in place
        return args[0]
    if isinstance(rows[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*rows))
    return torch.cat(rows)


def _shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of what an operation draws: that of a tensor, or a list of sizes."""
    for value in (*args, kwargs.get("size")):
        if torch.is_tensor(value):
            return tuple(value.shape)
        if isinstance(value, (list, tuple)):
            return tuple(value)
    return ()


def _row(value: Any, row: int, rows: int) -> Any:
    """Return the part of an argument of an operation for one row."""
    if torch.is_tensor(value):
        return value[row : row + 1] if value.shape[:1] == (rows,) else value
    if isinstance(value, (list, tuple)) and list(value[:1]) == [rows]:
        return [1, *value[1:]]
    return value
