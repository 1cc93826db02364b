"""Operations that put entries of axis 0 together, and yet give each sample what is its own.

Loops over samples (`tf.map_fn`, `tf.vectorized_map`), entries that are chosen by the place of a
sample, counts within a sample, and what knows the samples of ragged and sparse tensors.
"""

from __future__ import annotations

from typing import Any

from ga_model.reading._operations import (
    BY_SAMPLE,
    LIST,
    MEAN,
    MIXED,
    ONE,
    PARTS,
    SHARED,
    SUM,
    axis_of,
    names,
    number_of,
)

_SCATTERS = names(
    "TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate "
)
_TO_ROWS = names(
    "RaggedTensorToTensor SegmentSum SegmentSumV2 SparseReduceSum SparseSegmentSum "
    "SparseTensorDenseMatMul SparseToDense "
)


def is_own(op: Any, kinds: list[Any]) -> bool:
    """Return whether an operation gives each sample what follows from it, as its inputs tell."""
    others = kinds[2 if op.type == "DenseBincount" else 1 :]
    if kinds[0] != BY_SAMPLE or {MIXED, MEAN, SUM} & set(others):
        return False
    if op.type == "DenseBincount":
        return op.inputs[0].shape.rank == 2 and _is_kept_at_a_number(op.inputs[1])
    if op.type == "GatherV2":
        is_along_samples = axis_of(op, 2, op.inputs[0].shape.rank) == 0
        return is_along_samples and _are_places(op.inputs[1])
    if op.type != "GatherNd" and op.type not in _SCATTERS:
        return False
    indices = op.inputs[1].op  # (samples, axes), a place and what else leads to an entry
    is_joined = indices.type in ("Pack", "ConcatV2") and op.inputs[1].shape.rank == 2
    return is_joined and _are_places(indices.inputs[0])


def kind_by_parts(op: Any, kinds: list[Any]) -> str:
    """Return what an operation gives that knows which entries are of one sample."""
    if {MIXED, MEAN, SUM} & set(kinds):
        return MIXED
    return BY_SAMPLE if BY_SAMPLE in kinds or op.type in _TO_ROWS else PARTS


def _are_places(tensor: Any) -> bool:
    """Return whether a tensor has the places of all samples, in their order."""
    op = tensor.op
    while op.type in ("Cast", "ExpandDims", "Identity", "Reshape"):
        op = op.inputs[0].op
    if op.type == "SelectV2" and "pfor" in op.name:  # of no sample at all, `vectorized_map` asks
        op = op.inputs[1].op
    if op.type != "Range" or number_of(op.inputs[0]) != 0 or number_of(op.inputs[2]) != 1:
        return False
    return _is_count(op.inputs[1])


def _is_count(tensor: Any) -> bool:
    """Return whether a number is the length of axis 0 of a tensor, which is not known."""
    op = tensor.op
    while op.type in ("Cast", "Identity", "Max", "Reshape"):
        op = op.inputs[0].op
    if op.type == "Pack":  # of several tensors, which have the same length
        return all(map(_is_count, op.inputs))
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    length = op.inputs[0].op.inputs[0].shape[:1]
    return number_of(op.inputs[1]) == 0 and length == [None]


def _is_kept_at_a_number(tensor: Any) -> bool:
    """Return whether the least and the most that a number can be are the same."""
    inner = [t.op for t in tensor.op.inputs if t.op.type == "Maximum"]
    if tensor.op.type != "Minimum" or len(inner) != 1:
        return number_of(tensor) is not None
    bounds = {number_of(t) for op in (tensor.op, *inner) for t in op.inputs} - {None}
    return len(bounds) == 1


def kind_in_loop(op: Any, kinds: list[Any]) -> str | None:
    """Return what an operation gives in a loop over samples, or None if there is none."""
    if op.type == "TensorListGetItem" and kinds[0] == LIST:
        return ONE if _is_counter(op.inputs[1]) else MIXED
    if ONE not in kinds:
        return None
    if op.type == "TensorListSetItem" and kinds[2] == ONE:
        is_next = kinds[0] in (None, SHARED, LIST) and _is_counter(op.inputs[1])
        return LIST if is_next else MIXED
    return ONE if set(kinds) <= {None, ONE, SHARED} else MIXED


def _is_counter(index: Any) -> bool:
    """Return whether an index counts the iterations of a loop, and is used for nothing else."""
    if index.op.type != "Placeholder":
        return False
    users = list(index.consumers())
    sums = [user for user in users if user.type == "AddV2"]
    others = [user.type for user in users if user.type != "AddV2"]
    others += [user.type for total in sums for user in total.outputs[0].consumers()]
    is_next = [number_of(t) for total in sums for t in total.inputs if t is not index] == [1]
    return is_next and set(others) <= {"Identity", "TensorListGetItem", "TensorListSetItem"}
