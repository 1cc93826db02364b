"""Whether a call of a layer treats samples one by one: it is tried at once, and in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ga_model.core.proof.trial import norm_of

TOTAL = 5  # samples of a trial, in parts of three and two
_ENDS = (3, TOTAL)
_TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1}


def kinds_of(run: Callable[[int, int], Sequence[Any]]) -> list[str | None]:
    """Return what each output of a function is to the samples.

    Args:
        run: runs it on samples from one place up to another, and returns arrays.

    Returns:
        "rows" of what has one entry of axis 0 for each sample, which follows from that sample
        alone; "mean" or "sum" of what is one over samples; or None.
    """
    whole, parts, begin = run(0, TOTAL), [], 0
    for end in _ENDS:
        parts.append(run(begin, end))
        begin = end
    return [_kind(output, [part[place] for part in parts]) for place, output in enumerate(whole)]


def _kind(whole: Any, parts: Sequence[Any]) -> str | None:
    tolerance = _TOLERANCE.get(str(whole.dtype), 1e-4)
    sizes = [end - begin for begin, end in zip((0, *_ENDS), _ENDS)]
    if whole.ndim and [part.shape for part in parts] == [(n, *whole.shape[1:]) for n in sizes]:
        joined = np.concatenate([np.asarray(part) for part in parts])
        return "rows" if _are_alike(joined, whole, tolerance) else None
    if any(part.shape != whole.shape for part in parts):
        return None
    numbers = [np.asarray(part, "float64") for part in parts]
    if _are_alike(sum(numbers), whole, tolerance):
        return "sum"
    mean = sum(size / TOTAL * number for size, number in zip(sizes, numbers))
    return "mean" if _are_alike(mean, whole, tolerance) else None


def _are_alike(found: Any, expected: Any, tolerance: float) -> bool:
    if expected.dtype == bool or np.asarray(expected).dtype.kind in "iu":
        return bool(np.array_equal(found, expected))
    found, expected = (np.asarray(a, "float64") for a in (found, expected))
    is_known = np.isfinite(expected)
    if found.shape != expected.shape or not np.array_equal(is_known, np.isfinite(found)):
        return False
    if expected.size and not is_known.any():
        return False  # nothing is seen
    difference = norm_of([(found - expected)[is_known]])
    return difference <= tolerance * norm_of([expected[is_known]]) + 1e-6
