"""The kind of an operation's output, from the kinds of its inputs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ga_model.reading._operations import (
    ALONG_LAST_AXIS,
    BY_SAMPLE,
    COUNT,
    ELEMENTWISE,
    KEEPS,
    LINEAR,
    MEAN,
    OF_IMAGES,
    OF_LABELS,
    REDUCTIONS,
    SHAPE,
    SHARED,
    SUM,
    axes_of,
)


def kind_of_shape(op: Any, kinds: list[Any]) -> str | None:
    """Return what an operation gives that computes with numbers of samples, or None."""
    if op.type in ("Identity", "Cast"):
        return str(kinds[0])
    if op.type == "Minimum" and set(kinds) == {COUNT}:  # in `tf.eye`
        return COUNT
    if op.type in ("RealDiv", "DivNoNan") and kinds == [SUM, COUNT]:
        return MEAN
    if op.type == "StridedSlice" and kinds[0] == SHAPE:
        begin, end = (tf.get_static_value(op.inputs[i]) for i in (1, 2))
        stride = tf.get_static_value(op.inputs[3])
        if begin is None or end is None or stride is None or begin[0] < 0 or stride[0] != 1:
            return None
        if begin[0] > 0:
            return SHARED
        return COUNT if op.get_attr("shrink_axis_mask") == 1 else SHAPE
    if op.type in ("Pack", "ConcatV2"):
        first, *others = [kind for t, kind in zip(op.inputs, kinds) if t.shape != (0,)]
        return SHAPE if first in (COUNT, SHAPE) and set(others) <= {SHARED} else None
    if op.type in ("Reshape", "BroadcastTo") and kinds == [BY_SAMPLE, SHAPE]:
        if op.type == "BroadcastTo" and op.inputs[0].shape.rank != op.outputs[0].shape.rank:
            return None
        return BY_SAMPLE  # which has the samples in front, as it had
    if op.type == "Fill" and kinds == [SHAPE, SHARED]:
        return BY_SAMPLE
    return None


def kind_of_mean(op: Any, kinds: list[Any]) -> str | None:
    """Return whether an operation leaves a mean or a sum over samples one, or None."""
    kind = MEAN if MEAN in kinds else SUM
    if op.type in REDUCTIONS:  # over other axes
        return kind if op.type in ("Mean", "Sum") and kinds[0] == kind else None
    if op.type not in LINEAR or not set(kinds) <= {kind, SHARED}:
        return None
    if op.type == "Mul":
        return kind if kinds.count(kind) == 1 else None
    if op.type in ("RealDiv", "DivNoNan"):
        return kind if kinds[1] == SHARED else None
    # A constant beside a sum counts once.
    return kind if kind == MEAN or SHARED not in kinds else None


def keeps_samples(op: Any, kinds: list[Any]) -> bool:
    """Return whether an operation treats samples one by one, and leaves them on axis 0."""
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks or any(tensor.shape.rank is None for tensor in op.outputs):
        return False
    of_samples = [rank for rank, kind in zip(ranks, kinds) if kind == BY_SAMPLE]
    shared = [t for t, kind in zip(op.inputs, kinds) if kind == SHARED]
    if not of_samples:
        return False
    rank, is_first = of_samples[0], kinds[0] == BY_SAMPLE
    if op.type in ELEMENTWISE:
        fit = [t.shape.rank < rank or (t.shape.rank == rank and t.shape[0] == 1) for t in shared]
        return bool(set(of_samples) == {rank} and all(fit))
    if op.type in ALONG_LAST_AXIS:
        return bool(is_first and rank > 1)
    if op.type in OF_LABELS:
        return set(kinds) == {BY_SAMPLE} and ranks[0] == 2
    if op.type in OF_IMAGES:
        return is_first and kinds.count(BY_SAMPLE) == 1
    if op.type in REDUCTIONS or op.type in ("ExpandDims", "Cumsum"):
        axes = axes_of(op)
        return is_first and axes is not None and 0 not in axes
    reads = KEEPS.get(op.type)
    return reads is not None and bool(reads(op, kinds, ranks))
