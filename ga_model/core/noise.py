"""How noisy gradients are, estimated from the microbatches of windows without an extra pass.

A microbatch i of weight n_i (its samples, for a mean over samples) has the mean gradient g_i. With
G the gradient over all data and Sigma the covariance of a single sample's gradient,

    E[g_i] = G    and    Cov[g_i] = Sigma / n_i, so    E[|g_i|^2] = |G|^2 + tr(Sigma) / n_i

For a window of K microbatches, with N = sum_i(n_i) and the gradient g = sum_i(n_i * g_i) / N, the
same holds with N for n_i. So, for any n_i,

    E[sum_i(n_i * |g_i|^2)] = N * |G|^2 + K * tr(Sigma)
    E[N * |g|^2]            = N * |G|^2 +     tr(Sigma)

and these two estimates are unbiased:

    S   = (sum_i(n_i * |g_i|^2) - N * |g|^2) / (K - 1)    of tr(Sigma)
    G_2 = |g|^2 - S / N                                   of |G|^2

For equal n_i = n, with m the mean of the |g_i|^2, the first is N * (m - |g|^2) / (K - 1), which is
(m - |g|^2) / (1 / n - 1 / N): the estimate of McCandlish et al., "An Empirical Model of Large-Batch
Training" (arXiv 1812.06162), appendix A.1, and so is the second. Their noise scale is tr(Sigma) /
|G|^2. A ratio of two noisy numbers is biased, so each is averaged over updates first.

Sums are kept in a unit u (see `window.Sums`), so gradients arrive as w_i * g_i with w_i = n_i / u.
The sum is over |w_i * g_i|^2 / w_i = w_i * |g_i|^2, which has the same unit as the weights, and
shrinks with them if the unit grows. Where losses are scaled, gradients are divided by the scale
first: it can be so large that their squares would leave the range of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import NamedTuple

import keras
from keras import ops

from ga_model.base import _numbers
from ga_model.base._internals import overwrites
from ga_model.base._types import Gradient, Scalar, Tensor


class Averages(NamedTuple):
    """Averages over windows, with more weight on later ones.

    Attributes:
        trace_of_covariance: average of S.
        squared_gradient_norm: average of G_2.
        batch_size: average of N, in samples or whatever the loss averages over.
        num_windows: number of measured windows.
    """

    trace_of_covariance: float = nan
    squared_gradient_norm: float = nan
    batch_size: float = nan
    num_windows: int = 0


class Squares(NamedTuple):
    """The contribution of one or several microbatches to the noise: scalars.

    Attributes:
        total: sum of w_i * |g_i|^2, in the unit of the weights w_i.
        number: number of microbatches with a weight.
    """

    total: Scalar
    number: Scalar

    @classmethod
    def of(
        cls,
        gradients: Sequence[Gradient],
        variables: Sequence[keras.Variable],
        relative_weight: Scalar,
        scale: Scalar,
    ) -> Squares:
        """Return the contribution of one microbatch.

        Args:
            gradients: gradients of the variables times `relative_weight`, or None.
            relative_weight: weight of the microbatch in the unit.
            scale: factor by which the loss was scaled.
        """
        squares = _numbers.divide_or_zero(
            squared_norm(gradients, variables, scale), relative_weight
        )
        return cls(squares, _numbers.like(squares, relative_weight != 0))

    def plus(self, other: Squares, shrink: Scalar) -> Squares:
        """Return the sum of both, where `shrink` converts this one to the unit of the other."""
        return Squares(self.total * shrink + other.total, self.number + other.number)


def squared_norm(
    gradients: Sequence[Gradient], variables: Sequence[keras.Variable], scale: Scalar
) -> Scalar:
    """Return the sum of squares of all entries of the gradients of the unscaled loss."""
    pairs = [(g, v) for g, v in zip(gradients, variables) if not overwrites(v)]
    dense = [_dense(g, v) for g, v in pairs if g is not None]
    squares = (ops.sum(ops.square(g / _numbers.like(g, scale))) for g in dense)
    return sum(map(_numbers.float64, squares), _numbers.float64(0.0))


def _dense(gradient: Gradient, variable: keras.Variable) -> Tensor:
    is_sparse = isinstance(gradient, tuple)
    if not is_sparse:
        return gradient
    return _numbers.dense(gradient.values, gradient.indices, variable.shape)


def averaged(
    before: Tensor, decay: Scalar, squares: Squares, weight: Scalar, norm: Scalar
) -> Tensor:
    """Return the decayed sums of an optimizer after one more window.

    Args:
        before: vector of the decayed sums of S, G_2, N and 1, and the number of windows.
        decay: decay of the averages.
        squares: sum of n_i * |g_i|^2, and K.
        weight: N, the sum of the weights.
        norm: |g|^2, the squared norm of the window's gradient.
    """
    trace = (squares.total - weight * norm) / (squares.number - 1.0)
    estimates = trace, norm - trace / weight, weight, ops.ones(())
    values = ops.stack([_numbers.like(before, value) for value in estimates])
    decay = _numbers.like(before, decay)
    after = ops.append(decay * before[:4] + (1.0 - decay) * values, before[4] + 1)
    # Leave out windows of one microbatch, and skipped updates.
    is_measured = ops.logical_and(squares.number >= 2, weight != 0)
    is_measured = ops.logical_and(is_measured, ops.all(ops.isfinite(values)))
    return _numbers.where(is_measured, after, before)


class GradientNoise:
    """The noise estimates of each optimizer of a model. Measuring never waits for the device.

    Attributes:
        decay: decay of the averages.
        asked_by: the callback that measures now, or None.
        last_asked_by: the callback that measured last, which owns these numbers.
    """

    def __init__(self) -> None:
        self.asked_by: keras.callbacks.Callback | None = None
        self.last_asked_by: keras.callbacks.Callback | None = None
        self.decay = 0.0
        # By ids of optimizers, with the optimizer.
        self._sums: dict[int, tuple[keras.optimizers.Optimizer, Tensor]] = {}

    def start(self, asked_by: keras.callbacks.Callback, decay: float) -> None:
        """Start to measure, or continue if the same callback measured last."""
        if asked_by is not self.last_asked_by:
            self.decay, self._sums = decay, {}
        self.asked_by = self.last_asked_by = asked_by

    def stop(self) -> None:
        self.asked_by = None

    def of(self, optimizer: keras.optimizers.Optimizer) -> Tensor:
        """Return the decayed sums of an optimizer, as in `averaged`."""
        _, sums = self._sums.get(id(optimizer)) or (optimizer, ops.zeros(5))
        return sums

    def set(self, optimizer: keras.optimizers.Optimizer, sums: Tensor) -> None:
        self._sums[id(optimizer)] = optimizer, sums

    def averages(self) -> list[tuple[keras.optimizers.Optimizer, Averages]]:
        """Return each optimizer with its averages."""
        return [(optimizer, _averages_of(sums)) for optimizer, sums in self._sums.values()]


def _averages_of(sums: Tensor) -> Averages:
    trace, norm, size, weight, number = map(float, ops.convert_to_numpy(sums))
    if not number:
        return Averages()
    return Averages(trace / weight, norm / weight, size / weight, int(number))
