"""How far trained weights are from others: 1 is as far as training has moved those."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def change(value: Any, start: Any) -> Any:
    """Return what has been added to the start. That is zero also where both are infinite."""
    with np.errstate(all="ignore"):
        added = value.astype("float64") - start.astype("float64")
        return np.where((value == start) | (np.isnan(value) & np.isnan(start)), 0.0, added)


def relative_difference(value: Any, start: Any, reference: Any, reference_start: Any) -> float:
    """Return the difference of two changes against the norm of that of the reference."""
    of_reference = change(reference, reference_start)
    with np.errstate(all="ignore"):
        error = np.linalg.norm(change(value, start) - of_reference)
        size = np.linalg.norm(of_reference)
    if not error:
        return 0.0
    return float(error / size) if size else math.inf
