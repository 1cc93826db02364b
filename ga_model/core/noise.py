"""The noise of gradients: estimates from microbatches, and their averages.

What is estimated stands in `noise_scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from keras import ops

from ga_model.base import _numbers
from ga_model.base._internals import overwrites
from ga_model.core.noise_scale import Averages, estimates


class Squares(NamedTuple):
    """The contribution of one or several microbatches to the noise, scalars.

    Attributes:
        total: the sum of w_i * |g_i|^2, in the unit of the weights w_i.
        number: microbatches that have a weight.
    """

    total: Any
    number: Any

    @classmethod
    def of(
        cls, gradients: Sequence[Any], variables: Sequence[Any], relative_weight: Any, scale: Any
    ) -> Squares:
        """Return that of one microbatch.

        Args:
            gradients: of variables, times `relative_weight`, or None.
            variables: these.
            relative_weight: the weight in the unit.
            scale: what the loss was scaled by.
        """
        squares = _numbers.share(squared_norm(gradients, variables, scale), relative_weight)
        return cls(squares, _numbers.like(squares, relative_weight != 0))

    def plus(self, other: Squares, shrink: Any) -> Squares:
        """Return both, where the unit of the other one is so many times this one's."""
        return Squares(self.total * shrink + other.total, self.number + other.number)


def squared_norm(gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> Any:
    """Return the sum of the squares of all entries, of gradients whose loss was not scaled."""
    pairs = [(g, v) for g, v in zip(gradients, variables) if not overwrites(v)]
    dense = [_dense(g, v) for g, v in pairs if g is not None]
    squares = (ops.sum(ops.square(g / _numbers.like(g, scale))) for g in dense)
    return sum(map(_numbers.float64, squares), _numbers.float64(0.0))


def _dense(gradient: Any, variable: Any) -> Any:
    is_sparse = isinstance(gradient, tuple)
    if not is_sparse:
        return gradient
    return _numbers.dense(gradient.values, gradient.indices, variable.shape)


class Estimate:
    """The averages for one optimizer, which no batch waits for.

    Args:
        decay: of the averages.

    Attributes:
        sums: of what was seen, times what each still counts, a vector; the entry before the last is
            of ones, and the last is the number of windows.
        decay: as it is passed.
    """

    def __init__(self, decay: float) -> None:
        self.set_decay(decay)
        self.restart()

    def restart(self) -> None:
        self.sums = ops.zeros(5)

    def set_decay(self, decay: float) -> None:
        self.decay = decay

    def averages(self) -> Averages:
        trace, norm, size, weight, number = map(float, ops.convert_to_numpy(self.sums))
        if not number:
            return Averages.of_nothing()
        return Averages(trace / weight, norm / weight, size / weight, int(number))


def averaged(before: Any, decay: Any, squares: Squares, weight: Any, norm: Any) -> Any:
    """Return the sums of an `Estimate` after one more window.

    Args:
        before: the sums.
        decay: of the averages.
        squares: of its microbatches. The weights have no unit.
        weight: the sum of the weights.
        norm: the square of the norm of its gradient.
    """
    one = ops.ones(())
    found = (*estimates(*squares, weight, norm), weight, one)
    values = ops.stack([_numbers.like(before, value) for value in found])
    decay = _numbers.like(before, decay)
    after = ops.append(decay * before[:4] + (1.0 - decay) * values, before[4] + 1)
    # Not of windows of one microbatch, nor of an update that is skipped.
    is_measured = ops.logical_and(squares.number >= 2, weight != 0)
    is_measured = ops.logical_and(is_measured, ops.all(ops.isfinite(values)))
    return _numbers.where(is_measured, after, before)
