"""The noise of gradients on PyTorch: estimates from microbatches, and their averages.

What is estimated stands in `sums/_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ga_model.sums._noise import Averages, estimates


class Squares(NamedTuple):
    """The contribution of one or several microbatches to the noise.

    Attributes:
        total: the sum of w_i * |g_i|^2, in the unit of the weights w_i.
        number: microbatches that have a weight.
    """

    total: float
    number: float

    @classmethod
    def of(cls, gradients: Sequence[Any], relative_weight: float, optimizer: Any) -> Squares:
        """Return that of one microbatch.

        Args:
            gradients: tensors, times `relative_weight`.
            relative_weight: the weight in the unit.
            optimizer: what the gradients are for. It knows how the loss was scaled.
        """
        if not relative_weight:
            return cls(0.0, 0.0)
        return cls(squared_norm(gradients, optimizer) / relative_weight, 1.0)

    def plus(self, other: Squares) -> Squares:
        return Squares(self.total + other.total, self.number + other.number)

    def times(self, factor: float) -> Squares:
        """Return it in another unit."""
        return Squares(self.total * factor, self.number)


def squared_norm(gradients: Sequence[Any], optimizer: Any) -> float:
    """Return the sum of the squares of all entries, of gradients whose loss was not scaled."""
    if not gradients:
        return 0.0
    with torch.no_grad():
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        scale = float(optimizer.scale_loss(torch.ones(())))
    return float((norms.double() / scale).square().sum())


class Estimate:
    """The averages for one optimizer.

    Args:
        decay: of the averages.
    """

    def __init__(self, decay: float) -> None:
        self.set_decay(decay)
        self.restart()

    def restart(self) -> None:
        # Sums of what was seen, times what each still counts; the last entry is of ones.
        self._sums = [0.0] * 4
        self._num_windows = 0

    def set_decay(self, decay: float) -> None:
        self._decay = decay

    def update(self, squares: Squares, weight: float, norm: float) -> None:
        """Take a window in.

        Args:
            squares: of its microbatches. The weights have no unit.
            weight: the sum of the weights.
            norm: the square of the norm of its gradient.
        """
        if squares.number < 2 or not weight:
            return
        values = [*estimates(*squares, weight, norm), weight, 1.0]
        if not all(map(math.isfinite, values)):  # of an update that is skipped
            return
        decay = self._decay
        self._sums = [decay * a + (1.0 - decay) * b for a, b in zip(self._sums, values)]
        self._num_windows += 1

    def averages(self) -> Averages:
        if not self._num_windows:
            return Averages.of_nothing()
        trace, norm, weight = (part / self._sums[3] for part in self._sums[:3])
        return Averages(trace, norm, weight, self._num_windows)
