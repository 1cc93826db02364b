"""The noise of gradients on JAX: estimates from microbatches, and their averages.

What is estimated stands in `sums/_noise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras

from ga_model.sums._noise import Averages, estimates


class Squares(NamedTuple):
    """The contribution of one or several microbatches to the noise, scalars.

    Attributes:
        total: the sum of w_i * |g_i|^2, in the unit of the weights w_i.
        number: microbatches that have a weight.
    """

    total: Any
    number: Any

    @classmethod
    def of(cls, gradients: Sequence[Any], relative_weight: Any, scale: Any) -> Squares:
        """Return that of one microbatch.

        Args:
            gradients: arrays, times `relative_weight`.
            relative_weight: the weight in the unit.
            scale: what the loss was scaled by.
        """
        is_any = relative_weight != 0
        squares = squared_norm(gradients, scale) / jnp.where(is_any, relative_weight, 1)
        return cls(jnp.where(is_any, squares, 0), is_any.astype(squares.dtype))

    def plus(self, other: Squares, shrink: Any) -> Squares:
        """Return both, where the unit of the other one is so many times this one's."""
        return Squares(self.total * shrink + other.total, self.number + other.number)


def squared_norm(gradients: Sequence[Any], scale: Any) -> Any:
    """Return the sum of the squares of all entries, of gradients whose loss was not scaled."""
    zero = jnp.zeros(())
    return sum((jnp.square(g / jnp.asarray(scale, g.dtype)).sum() for g in gradients), zero)


def loss_scale(optimizer: Any, values: Sequence[Any]) -> Any:
    """Return what an optimizer scales losses by.

    Args:
        optimizer: the optimizer.
        values: of its variables.
    """
    with keras.StatelessScope(list(zip(optimizer.variables, values))):
        return optimizer.scale_loss(jnp.ones(()))


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
        self.sums = jnp.zeros(5)

    def set_decay(self, decay: float) -> None:
        self.decay = decay

    def averages(self) -> Averages:
        trace, norm, size, weight, number = map(float, self.sums)
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
    values = jnp.stack([*estimates(*squares, weight, norm), weight, jnp.ones(()), jnp.ones(())])
    after = jnp.append((decay * before + (1.0 - decay) * values)[:4], before[4] + 1)
    # Not of windows of one microbatch, nor of an update that is skipped.
    is_measured = (squares.number >= 2) & (weight != 0) & jnp.isfinite(values).all()
    return jnp.where(is_measured, after, before)
