"""Relative differences of trained weights: 1 is as far as training moved the reference weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def change(value: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the difference from the start, in float64; zero where both are infinite or NaN."""
    with np.errstate(all="ignore"):
        added = value.astype("float64") - start.astype("float64")
        return np.where((value == start) | (np.isnan(value) & np.isnan(start)), 0.0, added)


def relative_differences(*values: Sequence[np.ndarray]) -> list[float]:
    """Return, per variable, ||change - reference change|| / ||reference change||.

    Args:
        *values: variables after training, at the start, and of the reference.
    """
    return [_relative_difference(*arrays) for arrays in zip(*values)]


def _relative_difference(
    value: np.ndarray, start: np.ndarray, reference: np.ndarray, reference_start: np.ndarray
) -> float:
    reference_change = change(reference, reference_start)
    with np.errstate(all="ignore"):
        error = np.linalg.norm(change(value, start) - reference_change)
        size = np.linalg.norm(reference_change)
    if not error:
        return 0.0
    return float(error / size) if size else math.inf
