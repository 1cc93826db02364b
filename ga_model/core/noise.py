"""How noisy gradients are: estimates from the microbatches of windows, at no extra pass.

A microbatch i of weight n_i (rows, of a loss that is a mean over rows) has the mean gradient g_i.
With G the gradient over all data and Sigma the covariance of a single row's gradient,

    E[g_i] = G    and    Cov[g_i] = Sigma / n_i, so    E[|g_i|^2] = |G|^2 + tr(Sigma) / n_i

A window of K microbatches has N = sum_i(n_i) and the gradient g = sum_i(n_i * g_i) / N, of which
the same holds with N for n_i. So, whatever the n_i are,

    E[sum_i(n_i * |g_i|^2)] = N * |G|^2 + K * tr(Sigma)
    E[N * |g|^2]            = N * |G|^2 +     tr(Sigma)

and these two are unbiased:

    S   = (sum_i(n_i * |g_i|^2) - N * |g|^2) / (K - 1)    of tr(Sigma)
    G_2 = |g|^2 - S / N                                   of |G|^2

For equal n_i = n, with m the mean of the |g_i|^2, the first is N * (m - |g|^2) / (K - 1), which is
(m - |g|^2) / (1 / n - 1 / N): the estimate of McCandlish et al., "An Empirical Model of Large-Batch
Training" (arXiv 1812.06162), appendix A.1, and so is the second. Their noise scale is
tr(Sigma) / |G|^2. A ratio of two noisy numbers is biased, so each is averaged over updates first.

As sums are kept in a unit u (see `window.Sums`), gradients arrive as w_i * g_i with w_i = n_i / u.
What is summed is |w_i * g_i|^2 / w_i = w_i * |g_i|^2, which is in that unit as the weights are, and
shrinks as they do where it grows. Where losses are scaled, gradients are divided by the scale
first: it can be so large that their squares would leave the range of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any, NamedTuple

from keras import ops

from ga_model.base import _numbers
from ga_model.base._internals import overwrites


class Averages(NamedTuple):
    """Averages over windows, the later ones counting more.

    Attributes:
        trace_of_covariance: that of S.
        squared_gradient_norm: that of G_2.
        batch_size: that of N, in rows or whatever the loss averages over.
        num_windows: windows that were measured.
    """

    trace_of_covariance: float = nan
    squared_gradient_norm: float = nan
    batch_size: float = nan
    num_windows: int = 0


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


def averaged(before: Any, decay: Any, squares: Squares, weight: Any, norm: Any) -> Any:
    """Return the sums of an optimizer after one more window.

    Args:
        before: of what was seen, times what each still counts, a vector; the entry before the last
            is of ones, and the last is the number of windows.
        decay: of the averages.
        squares: of its microbatches: the sum of n_i * |g_i|^2, and K.
        weight: N, the sum of the weights.
        norm: |g|^2, the square of the norm of its gradient.
    """
    trace = (squares.total - weight * norm) / (squares.number - 1.0)
    found = trace, norm - trace / weight, weight, ops.ones(())
    values = ops.stack([_numbers.like(before, value) for value in found])
    decay = _numbers.like(before, decay)
    after = ops.append(decay * before[:4] + (1.0 - decay) * values, before[4] + 1)
    # Not of windows of one microbatch, nor of an update that is skipped.
    is_measured = ops.logical_and(squares.number >= 2, weight != 0)
    is_measured = ops.logical_and(is_measured, ops.all(ops.isfinite(values)))
    return _numbers.where(is_measured, after, before)


class GradientNoise:
    """The estimates of a model, one for each optimizer, and who asked for them. No batch waits.

    Attributes:
        decay: of the averages.
        asked_by: the callback that measures now, or None.
        last_asked_by: the one that measured last, whose numbers these are.
    """

    def __init__(self) -> None:
        self.asked_by: Any = None
        self.last_asked_by: Any = None
        self.decay = 0.0
        self._sums: dict[int, tuple[Any, Any]] = {}  # and optimizers, by the ids of these

    def start(self, asked_by: Any, decay: float) -> None:
        """Begin to measure, or go on where the same callback ended."""
        if asked_by is not self.last_asked_by:
            self.decay, self._sums = decay, {}
        self.asked_by = self.last_asked_by = asked_by

    def stop(self) -> None:
        self.asked_by = None

    def of(self, optimizer: Any) -> Any:
        """Return the sums of an optimizer, as `averaged` has them."""
        _, sums = self._sums.get(id(optimizer)) or (optimizer, ops.zeros(5))
        return sums

    def set(self, optimizer: Any, sums: Any) -> None:
        self._sums[id(optimizer)] = optimizer, sums

    def averages(self) -> list[tuple[Any, Averages]]:
        """Return the optimizers and their averages."""
        return [(optimizer, _averages_of(sums)) for optimizer, sums in self._sums.values()]


def _averages_of(sums: Any) -> Averages:
    trace, norm, size, weight, number = map(float, ops.convert_to_numpy(sums))
    if not number:
        return Averages()
    return Averages(trace / weight, norm / weight, size / weight, int(number))
