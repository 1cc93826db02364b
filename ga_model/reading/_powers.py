"""Follow values that were divided by the number of samples, or by a power of it.

The gradient of a mean with respect to samples has an entry for each of them, and each is divided by
their number: of a microbatch, that is another number than of the full batch. What does not look at
the length of a gradient, such as its sign or its direction, does not see that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ga_model.reading._operations import DIVISIONS, MOVES, PRODUCTS, names, number_of, value_of

_PRODUCTS = PRODUCTS | names("MulNoNan")
_KEEPS = MOVES | names("Abs EuclideanNorm LeakyRelu Max Min Relu")
_FORGETS = names("IsFinite IsInf IsNan OnesLike Rank Shape ShapeN Sign Size ZerosLike")
_POWERS = {"Square": 2.0, "Sqrt": 0.5, "Rsqrt": -0.5, "Reciprocal": -1.0, "Inv": -1.0}
_ALIKE = names("Add AddN AddV2 ConcatV2 Maximum Minimum Pack SelectV2 Select Sub")
_COMPARISONS = names("Equal Greater GreaterEqual Less LessEqual NotEqual")
_EPSILON = 1e-6  # what is no more than that keeps a quotient from being 0 / 0


def is_product(op: Any) -> bool:
    """Return whether an operation multiplies or divides its inputs."""
    return op.type in _PRODUCTS or op.type in DIVISIONS


def power_after(op: Any, powers: Sequence[float]) -> float | None:
    """Return by which power of the number of samples an output is divided, if it is one.

    Args:
        op: the operation.
        powers: of its inputs, by which power each is divided.
    """
    if op.type in _FORGETS:
        return 0.0
    if op.type in _POWERS:
        return powers[0] * _POWERS[op.type]
    if op.type == "Pow":
        exponent = number_of(op.inputs[1])
        return None if exponent is None else powers[0] * exponent
    if op.type in DIVISIONS:
        return powers[0] - powers[1]
    if op.type in _PRODUCTS:
        return sum(powers)
    if op.type in _ALIKE or op.type in _COMPARISONS or op.type == "SquaredDifference":
        first = int(op.type in ("Select", "SelectV2"))
        counted = {
            power
            for power, tensor in list(zip(powers, op.inputs))[first:]
            if not _is_negligible(tensor)
        }
        if len(counted) != 1:
            return None
        power = counted.pop()
        factor = {"SquaredDifference": 2.0}.get(op.type, float(op.type in _ALIKE))
        return power * factor
    return max(powers, key=abs) if op.type in _KEEPS else None


def _is_negligible(tensor: Any) -> bool:
    value = value_of(tensor)
    is_zero = tensor.op.type == "ZerosLike"
    return is_zero or bool(value is not None and np.all(np.abs(value) <= _EPSILON))
