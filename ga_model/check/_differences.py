"""How far trainings differ, and how far rounding errors explain it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ga_model.base._internals import layers_in

# The distance of 1 from the next larger number.
_ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def value_of(variable: Any) -> Any:
    """Return the value of a variable, which does not change with it."""
    return np.array(keras.ops.convert_to_numpy(variable))


def add_rounding_errors(model: Any) -> None:
    """Add a rounding error to every weight, up or down.

    It is one of the dtype that the weight's layer computes in. Frozen weights have one, too.
    """
    computed_in = compute_dtypes(model)
    generator = np.random.default_rng(0)
    for variable in model.weights:
        if variable.dtype in _ROUNDING:
            value = value_of(variable)
            finite = np.where(np.isfinite(value), value, 0)
            error = _ROUNDING[coarser(str(variable.dtype), computed_in[id(variable)])]
            sign = generator.choice([-error, error], size=value.shape)
            variable.assign((value + finite * sign).astype(value.dtype))


def compute_dtypes(model: Any) -> dict[int, str]:
    """Return what each weight's layer computes in, by the identity of the weight."""
    computed_in = {}
    for layer in layers_in(model):  # the layers of a layer follow it
        computed_in.update({id(v): layer.compute_dtype for v in layer.weights})
    return computed_in


def coarser(dtype: str, other: str) -> str:
    """Return the dtype that rounds more. One that does not round, such as int64, stays."""
    rounds_more = dtype in _ROUNDING and _ROUNDING.get(other, 0.0) > _ROUNDING[dtype]
    return other if rounds_more else dtype


def relative_differences(
    values: Sequence[Any], reference: Sequence[Any], start: Sequence[Any], own_start: Sequence[Any]
) -> list[float]:
    """Return the relative difference of the change of each variable."""
    return [
        _relative(change(w, w0), change(r, r0))
        for w, r, r0, w0 in zip(values, reference, start, own_start)
    ]


def change(value: Any, start: Any) -> Any:
    """Return what has been added to the start. That is zero also where both are infinite."""
    with np.errstate(all="ignore"):
        added = value.astype("float64") - start.astype("float64")
        return np.where((value == start) | (np.isnan(value) & np.isnan(start)), 0.0, added)


def _relative(change: Any, reference: Any) -> float:
    with np.errstate(all="ignore"):
        error, size = np.linalg.norm(change - reference), np.linalg.norm(reference)
    if not error:
        return 0.0
    return float(error / size) if size else math.inf
