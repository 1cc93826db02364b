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

from collections.abc import Callable
from typing import Any, NamedTuple


def estimates(squares: Any, count: Any, weight: Any, norm: Any) -> tuple[Any, Any]:
    """Return S and G_2 of a window.

    Args:
        squares: the sum of n_i * |g_i|^2.
        count: K, above 1.
        weight: N.
        norm: |g|^2.
    """
    trace = (squares - weight * norm) / (count - 1.0)
    return trace, norm - trace / weight


class Averages(NamedTuple):
    """Averages over windows, the later ones counting more.

    Attributes:
        trace_of_covariance: that of S.
        squared_gradient_norm: that of G_2.
        batch_size: that of N, in rows or whatever the loss averages over.
        num_windows: windows that were measured.
    """

    trace_of_covariance: float
    squared_gradient_norm: float
    batch_size: float
    num_windows: int

    @classmethod
    def of_nothing(cls) -> Averages:
        nan = float("nan")
        return cls(nan, nan, nan, 0)


class GradientNoise:
    """The estimates of a model, one for each optimizer, and who asked for them.

    They outlive a `fit`, because functions that are traced then may hold their variables.

    Args:
        make_estimate: makes what averages over the windows of one optimizer, from the decay of the
            averages: it has `restart()`, `set_decay(decay)` and `averages()`.

    Attributes:
        asked_by: the callback that measures now, or None.
        last_asked_by: the one that measured last, whose numbers these are.
    """

    def __init__(self, make_estimate: Callable[[float], Any]) -> None:
        self._make_estimate = make_estimate
        self.asked_by: Any = None
        self.last_asked_by: Any = None
        self._decay = 0.0
        self._estimates: dict[int, tuple[Any, Any]] = {}

    def start(self, asked_by: Any, decay: float) -> None:
        """Begin to measure, or go on where the same callback ended."""
        self._decay = decay
        for _, estimate in self._estimates.values():
            estimate.set_decay(decay)
            if asked_by is not self.last_asked_by:
                estimate.restart()
        self.asked_by = self.last_asked_by = asked_by

    def stop(self) -> None:
        self.asked_by = None

    def of(self, optimizer: Any) -> Any:
        """Return the optimizer's estimate, made on first use."""
        if id(optimizer) not in self._estimates:
            self._estimates[id(optimizer)] = (optimizer, self._make_estimate(self._decay))
        return self._estimates[id(optimizer)][1]

    def averages(self) -> list[tuple[Any, Averages]]:
        """Return the optimizers and their averages."""
        return [
            (optimizer, estimate.averages()) for optimizer, estimate in self._estimates.values()
        ]
