"""What becomes of the axis of samples, where it is not the first."""

from __future__ import annotations

from typing import Any

from ga_model.reading._operations import axis_of, values_of

CHOSEN = -1  # in the place of an axis: there is a part of the samples, or more than they are


def axis_after_slice(op: Any, axis: int) -> int | None:
    """Return the axis of samples behind a `StridedSlice`, or `CHOSEN`.

    Args:
        op: the operation.
        axis: of samples in its input, counted from the front.
    """
    rank, number = op.inputs[0].shape.rank, op.inputs[1].shape[0]
    if rank is None or number is None:
        return None
    masks = {
        name: op.get_attr(name)
        for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    }

    def has(name: str, place: int) -> bool:
        return bool(masks[name] >> place & 1)

    num_new = sum(has("new_axis_mask", place) for place in range(number))
    has_ellipsis = bool(masks["ellipsis_mask"])
    skipped = rank - (number - num_new - has_ellipsis)
    before = after = 0  # axes of the input and of the output so far
    for place in range(number):
        if has("ellipsis_mask", place):
            if axis < before + skipped:
                return after + axis - before
            before, after = before + skipped, after + skipped
        elif has("new_axis_mask", place):
            after += 1
        elif before == axis:
            strides = values_of(op, 3)
            is_all = has("begin_mask", place) and has("end_mask", place) and strides
            is_kept = is_all and strides[place] == 1 and not has("shrink_axis_mask", place)
            return after if is_kept else CHOSEN
        else:
            before, after = before + 1, after + (not has("shrink_axis_mask", place))
    return after + axis - before


def chooses(op: Any, axis: int) -> bool:
    """Return whether an operation takes some of the samples, moves or repeats them.

    Args:
        op: the operation.
        axis: of samples in its first input, or in that which it splits.
    """
    rank = op.inputs[0].shape.rank
    if op.type == "StridedSlice":
        return axis_after_slice(op, axis) == CHOSEN
    if op.type == "Slice":
        begin, size = values_of(op, 1), values_of(op, 2)
        is_all = size and size[axis] == -1
        is_alike = op.inputs[0].shape[axis] == op.outputs[0].shape[axis] is not None
        return bool(begin and (begin[axis] or not (is_all or is_alike)))
    if op.type == "Tile":
        repeated = values_of(op, 1)
        return not repeated or repeated[axis] != 1
    if op.type in ("MirrorPad", "Pad", "PadV2"):
        padded = values_of(op, 1)
        return not padded or any(padded[2 * axis : 2 * axis + 2])
    if op.type == "Roll":
        return not {axis, axis - rank}.isdisjoint(values_of(op, 2))
    if op.type == "Unpack":
        return bool(op.get_attr("axis") in (axis, axis - rank))
    places = {"GatherV2": 2, "Split": 0, "SplitV": 2, "ConcatV2": len(op.inputs) - 1}
    if op.type in places:
        return axis_of(op, places[op.type], op.outputs[0].shape.rank or 0) == axis
    return False


def keeps_axis(op: Any, axis: int) -> bool:
    """Return whether a reshape leaves an axis, and those in front of it, what they are."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if None in (before.rank, after.rank) or not before[:axis].is_fully_defined():
        return False
    return list(before[: axis + 1]) == list(after[: axis + 1])


def makes_parts(op: Any) -> bool:
    """Return whether there may be several entries of axis 0 for each sample after a reshape."""
    if op.type != "Reshape":
        return False
    lengths = _lengths_of_entries(op)
    return lengths is None or lengths[1] < lengths[0]


def joins_samples(op: Any) -> bool:
    """Return whether entries of axis 0 are longer after a reshape, so that each has several."""
    lengths = _lengths_of_entries(op)
    return lengths is not None and lengths[1] > lengths[0]


def _lengths_of_entries(op: Any) -> list[int] | None:
    """Return the length of an entry of axis 0 before a reshape and after it, or None."""
    entries = [op.inputs[0].shape[1:], op.outputs[0].shape[1:]]
    if not all(entry.is_fully_defined() for entry in entries):
        return None
    return [int(entry.num_elements()) for entry in entries]
