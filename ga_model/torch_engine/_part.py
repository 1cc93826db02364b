"""The gradients of one optimizer, of a microbatch or their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ga_model.base._internals import raw
from ga_model.base._internals_torch import divide, multiply
from ga_model.torch_engine._torch_noise import Squares, squared_norm

if TYPE_CHECKING:
    from ga_model.sums._noise import GradientNoise


def sum_dtype(tensor: Any) -> torch.dtype:
    """Return the dtype in which tensors like this one are summed."""
    dtype: torch.dtype = tensor.dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Part:
    """The gradients that one microbatch gave to one optimizer, or their sum over several.

    Args:
        optimizer: the optimizer.
        variables: the variables that it is to update.
        gradients: one per variable, a tensor or None.
        in_pairs: whether the optimizer's `apply_gradients` makes the update, and not its `apply`.

    Attributes:
        squares: what they tell of their noise, or None where nobody asks.
        is_left_out: whether they are zeros, of microbatches without weight: nothing is added to
            them, and they are added to nothing.
    """

    def __init__(
        self, optimizer: Any, variables: list[Any], gradients: list[Any], in_pairs: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.in_pairs = in_pairs
        self.variables = variables
        self.squares: Squares | None = None
        self.is_left_out = False
        self._gradients = {id(v): g for v, g in zip(variables, gradients) if g is not None}

    def gradient(self, variable: Any) -> Any:
        """Return the gradient of a variable, or None."""
        return self._gradients.get(id(variable))

    def replace(self, variable: Any, gradient: Any) -> None:
        """Give a variable another gradient."""
        self._gradients[id(variable)] = gradient

    def tensors(self) -> list[Any]:
        return list(self._gradients.values())

    def leave_out(self) -> None:
        """Forget the gradients of a microbatch without weight, which may be NaN, and not that there
        are some."""
        self.is_left_out = True
        self._gradients = {key: torch.zeros_like(g) for key, g in self._gradients.items()}

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(gradient).all()) for gradient in self.tensors())

    def add(self, other: Part) -> None:
        """Add another part, whose tensors may become this one's."""
        if self.is_left_out:
            self._gradients.update(other._gradients)
            self.is_left_out = other.is_left_out
        else:
            for key, gradient in other._gradients.items():
                present = self._gradients.get(key)
                if present is None:
                    self._gradients[key] = gradient
                elif not other.is_left_out:
                    present += gradient
        if self.squares is not None and other.squares is not None:
            self.squares = self.squares.plus(other.squares)
        self.variables = other.variables  # those that are trained now

    def scale(self, factor: float) -> None:
        """Multiply the sum where it is."""
        if self.squares is not None:
            self.squares = self.squares.times(factor)
        if factor != 1.0 and self._gradients:
            multiply(self.tensors(), factor)

    def widen(self) -> None:
        """Let gradients in half precision be summed in float32."""
        for key, gradient in self._gradients.items():
            self._gradients[key] = gradient.to(sum_dtype(gradient))

    def times(self, factor: float) -> Part:
        """Return a copy of the part that is multiplied with a number."""
        gradients = [self._gradients.get(id(v)) for v in self.variables]
        gradients = [None if g is None else g * factor for g in gradients]
        part = Part(self.optimizer, self.variables, gradients, self.in_pairs)
        part.is_left_out = self.is_left_out
        return part

    def mean(self, total: float) -> list[Any]:
        """Return the sum divided by a number, in the dtypes of the variables."""
        if not total:
            total = float("nan")
        gradients = [self._gradients.get(id(v)) for v in self.variables]
        pairs = zip(gradients, self.variables)
        return [None if g is None else (g / total).to(raw(v).dtype) for g, v in pairs]

    def measure(self, relative_weight: float) -> None:
        """Note what the gradients of a microbatch tell of their noise."""
        self.squares = Squares.of(self.tensors(), relative_weight, self.optimizer)

    def measured(self, noise: GradientNoise, total: float, unit: float) -> None:
        """Take a window into the averages of the optimizer.

        Args:
            noise: what averages.
            total: the sum of the weights, in `unit`.
            unit: what they are counted in.
        """
        estimate = noise.of(self.optimizer)
        if self.squares is not None and total:
            norm = squared_norm(self.tensors(), self.optimizer) / total**2
            estimate.update(self.squares.times(unit), total * unit, norm)

    def put_back(self) -> None:
        """Let the gradients of the variables be the sum."""
        for variable in self.variables:
            raw(variable).grad = None if self.is_left_out else self.gradient(variable)

    def update(self, total: float) -> None:
        """Apply the optimizer to the sum divided by a number, and let go of the sum.

        Args:
            total: the sum of the weights.
        """
        with torch.no_grad():
            tensors = self.tensors()
            if total != 1.0 and tensors:
                divide(tensors, total)
            gradients = [self._gradients.get(id(v)) for v in self.variables]
            pairs = zip(gradients, self.variables)
            gradients = [None if g is None else g.to(raw(v).dtype) for g, v in pairs]
            self._gradients, tensors = {}, []
            if self.in_pairs:
                self.optimizer.apply_gradients(zip(gradients, self.variables))
            else:
                self.optimizer.apply(gradients, self.variables)
