"""The gradient noise scale, and a text about what it means for the batch."""

from __future__ import annotations

from typing import NamedTuple

from ga_model.core.noise_scale import Averages

_FEW_UPDATES = 10
_LEAST, _MOST = 0.01, 10**9  # noise scales that words give as numbers


class NoiseScale(NamedTuple):
    """What was measured for one optimizer. `str` of it says what that means.

    Attributes:
        averages: the smoothed estimates.
        decay: how they were smoothed.
        unit: what the loss averages over, for the words.
    """

    averages: Averages
    decay: float
    unit: str

    @property
    def noise_scale(self) -> float:
        """The noise scale; infinite where the noise hides the gradient, NaN without a window."""
        trace, norm, _, number = self.averages
        if not number:
            return float("nan")
        return max(trace, 0.0) / norm if norm > 0.0 else float("inf")

    def __str__(self) -> str:
        _, norm, batch_size, number = self.averages
        if not number:
            return "No window has had two microbatches yet, so nothing is known about the noise."
        unit, noise_scale = self.unit, self.noise_scale
        updates = min(number, round(1 / (1 - self.decay)))
        of = f"mean of about the last {updates:,} updates" if updates > 1 else "of one update"
        if norm <= 0.0:
            chance = " With so few updates, this may be chance." if updates < _FEW_UPDATES else ""
            return (
                "The noise hides the gradient: the estimate of its squared norm is not positive "
                f"({norm:.2g}, {of}).{chance} A window has {_count(batch_size)} {unit}, far "
                "fewer than the noise scale, or the training has converged. To measure it, average "
                "over more updates with a larger `decay`, or use larger windows."
            )
        if noise_scale < _LEAST:
            return (
                f"The gradient has no measurable noise ({of}): a smaller batch than "
                f"{_count(batch_size)} {unit} makes the same updates."
            )
        larger, smaller = (
            [_needed(batch_size * times, noise_scale) for times in (factor, 1.0)]
            for factor in (2.0, 0.5)
        )
        (twice, now), (half, _) = larger, smaller
        return (
            f"The gradient noise scale is about {_number(noise_scale, 2)} {unit} ({of}). "
            f"A window has {_count(batch_size)}: it needs {_number(now[0])} times the fewest "
            f"updates possible and {_number(now[1])} times the fewest {unit}. Twice the window "
            f"would take {_change(twice[0], now[0])} updates and {_change(twice[1], now[1])} "
            f"{unit}; half of it {_change(half[0], now[0])} updates and "
            f"{_change(half[1], now[1])} {unit}, each with a learning rate that fits. "
            + _verdict(batch_size, noise_scale)
        )


def _needed(batch_size: float, noise_scale: float) -> tuple[float, float]:
    """Return how many times the least of updates and samples training takes (equation 2.11)."""
    return 1.0 + noise_scale / batch_size, 1.0 + batch_size / noise_scale


def _verdict(batch_size: float, noise_scale: float) -> str:
    """Say which change saves a larger share of the one than it costs of the other.

    Twice the batch saves a share of noise_scale / 2 / (batch_size + noise_scale) of the updates,
    and costs one of batch_size / (batch_size + noise_scale) in samples. For half of it, the two
    change places.
    """
    if batch_size < noise_scale / 2:
        return "A larger batch pays."
    if batch_size > noise_scale * 2:
        return "A smaller batch pays: this one uses many samples to save few updates."
    return "The batch is about right: a larger or smaller one costs more than it saves."


def _count(value: float) -> str:
    """Return a mean number of samples, whole where it is not small."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits, and never in scientific notation."""
    if value > _MOST:
        return f"more than {_MOST:,}"
    if value >= 10 ** (digits - 1):
        return f"{float(f'{value:.{digits}g}'):,.0f}"
    return f"{value:.{digits}g}"


def _change(new: float, old: float) -> str:
    percent = round(100 * (new / old - 1))
    return f"{abs(percent)} % {'fewer' if percent < 0 else 'more'}"
