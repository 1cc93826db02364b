"""Follow parts of the samples, and concatenated samples, through the graph of a step.

A step joins samples (generated ones behind real ones, two views), takes them apart again, and
chooses some by a mask. What a loss then averages over is the number of samples, a multiple of it,
or another number, such as that of the samples that a mask has chosen.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from ga_model.reading._alike import Alike
from ga_model.reading._operations import (
    BY_SAMPLE,
    COUNT,
    ELEMENTWISE,
    INSIDE,
    SHAPE,
    SHARED,
    axis_of,
    names,
    value_of,
)
from ga_model.reading._reading import Reading

_CHOSEN = "the indices of some of the samples"
_LENGTH = "a length that depends on the number of samples"

_OF_SHAPE = re.compile(r"(Shape|Size)(_\d+)?")  # in no scope: those of layers may be of tables
_SHAPING = names("BroadcastTo Fill Reshape")
_KEEPS_COUNTS = names("Cast Identity Maximum Mul Prod")
_OF_LENGTHS = names("AddV2 Cast FloorDiv Identity Maximum Mul Neg Pack Sub")


class PartsReading(Reading):
    """What the tensors of a step are to its samples, and to how many of them."""

    def __init__(self, *args: Any) -> None:
        self._length: dict[int, Any] = {}  # of axis 0, where it is not that of the samples
        # Of samples behind one another (views), where it is not one; None if it is not known.
        self._blocks: dict[int, int | None] = {}
        # Entries of axis 0 for each sample of a view, where it is not one; None for any integer.
        self._entries: dict[int, Fraction | None] = {}
        self._of_axis: tuple[dict[int, Any], ...] = (self._length, self._blocks, self._entries)
        self._stacked: set[int] = set()  # tensors with an axis of views, and behind it one of rows
        self._alike = Alike()
        super().__init__(*args)

    def kind_of_length(self, tensor: Any) -> Any:
        """Return a name of the number of entries on axis 0, or of what such a number counts."""
        return self._length.get(id(tensor), "rows")

    def _read(self, op: Any) -> None:
        super()._read(op)
        for output in op.outputs:
            self._follow_length(op, output)

    def _follow_length(self, op: Any, output: Any) -> None:
        """Note how many samples an output has, as the inputs tell."""
        kind = self._known.get(id(output))
        if kind == INSIDE:
            self._follow_views(op, output)
        if kind not in (BY_SAMPLE, SHAPE, COUNT):
            return
        lengths = [self._length[id(t)] for t in op.inputs if id(t) in self._length]
        if lengths:
            self._length.setdefault(id(output), lengths[0])
        length = self._length.get(id(output))
        alike = [t for t in op.inputs if self._length.get(id(t)) == length]
        if op.type != "Reshape":
            for kept in self._of_axis[1:]:
                found = [kept[id(t)] for t in alike if id(t) in kept]
                if found:
                    kept.setdefault(id(output), found[0])

    def _follow_views(self, op: Any, output: Any) -> None:
        """Note what an output has of views whose samples are not on axis 0."""
        if any(self._blocks.get(id(t), 1) != 1 for t in op.inputs):
            self._blocks.setdefault(id(output), None)
        if op.type == "Pack":
            is_stacked = op.get_attr("axis") == 0 and all(map(self._is_whole, op.inputs))
        else:
            is_stacked = op.type in ELEMENTWISE and any(id(t) in self._stacked for t in op.inputs)
        if is_stacked and self._axis.get(id(output)) == 1:
            self._stacked.add(id(output))

    def _is_whole(self, tensor: Any) -> bool:
        """Return whether a tensor has one entry of axis 0 for each sample."""
        key, is_by_sample = id(tensor), self.kind_of(tensor) == BY_SAMPLE
        return is_by_sample and not any(key in kept for kept in self._of_axis)

    def _take_length(self, tensor: Any, other: Any) -> None:
        """Take it as known that a tensor has as many samples as another one."""
        for kept in self._of_axis:
            kept.pop(id(tensor), None)
            if id(other) in kept:
                kept[id(tensor)] = kept[id(other)]

    def _kind(self, op: Any, kinds: list[Any]) -> str | None:
        if self._joins_views(op):
            return None
        part = self._part(op, kinds) if op.outputs else None
        return part if part is not None else super()._kind(op, kinds)

    def _part(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what an operation makes of numbers, places or parts of samples, or None."""
        output = op.outputs[0]
        if op.type == "Const":
            return self._shape(op)
        if self._rows is not None and set(kinds) == {SHARED, SHAPE} and op.type in _SHAPING:
            return SHARED  # the shape is perhaps that of weights, see `_shape`
        if op.type == "Where" and kinds == [BY_SAMPLE]:
            self._length[id(output)] = ("chosen", self._alike.number_of(output))
            return _CHOSEN
        if kinds[:1] == [_CHOSEN]:
            is_moved = op.type in ("Squeeze", "Reshape", "Cast", "Identity", "StridedSlice")
            self._length[id(output)] = self._length.get(id(op.inputs[0]))
            return _CHOSEN if is_moved else None
        if kinds[:2] == [BY_SAMPLE, _CHOSEN] and op.type in ("GatherV2", "GatherNd"):
            self._length[id(output)] = self._length.get(id(op.inputs[1]))
            return BY_SAMPLE
        if op.type == "Size" and kinds == [BY_SAMPLE]:
            return COUNT
        if op.type == "Prod" and kinds[0] == SHAPE:
            return COUNT
        if {COUNT, _LENGTH} & set(kinds) and set(kinds) <= {COUNT, _LENGTH, SHARED}:
            return self._length_after(op, kinds)
        if op.type == "Reshape" and kinds[0] == BY_SAMPLE and output.shape.rank:
            return self._reshaped(op)
        if op.type == "ConcatV2" and self._joins_samples(op, kinds):
            keys = list(map(id, op.inputs[:-1]))
            blocks = [self._blocks.get(key, 1) for key in keys]
            if len({(self._length.get(key), self._entries.get(key, 1)) for key in keys}) > 1:
                self._length[id(output)] = ("joined", id(op))
                self._blocks[id(output)] = None
            else:
                known = [number for number in blocks if number is not None]
                self._blocks[id(output)] = sum(known) if len(known) == len(blocks) else None
            return BY_SAMPLE
        if op.type in ("Split", "SplitV", "StridedSlice") and BY_SAMPLE in kinds[:2]:
            return self._parted(op, kinds)
        return None

    def _shape(self, op: Any) -> str | None:
        """Return what `tf.shape` or `tf.size` makes of a known number of samples: a constant."""
        if self._rows is None or not _OF_SHAPE.fullmatch(op.name):
            return None
        value = value_of(op.outputs[0])
        if op.name.startswith("Size"):
            return COUNT if np.ndim(value) == 0 and value and value % self._rows == 0 else None
        if np.ndim(value) != 1 or not len(value) or not value[0] or value[0] % self._rows:
            return None
        self._blocks[id(op.outputs[0])] = int(value[0]) // self._rows
        return SHAPE

    def _length_after(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what an operation makes of numbers of samples."""
        if op.type == "Mul" and kinds.count(COUNT) > 1:
            return None  # which is no number of samples
        if op.type in _KEEPS_COUNTS and _LENGTH not in kinds:
            return None if op.type == "Maximum" and self.binds(op) else COUNT
        if op.outputs[0].dtype.is_floating or op.type not in _OF_LENGTHS:
            return None
        is_shape = op.type == "Pack" and _LENGTH not in kinds and set(kinds[1:]) <= {SHARED}
        return None if is_shape else _LENGTH

    def binds(self, op: Any) -> bool:
        """Return whether the maximum of a number of samples and another one may be the other one.

        There is one sample at least, but a mask may choose none.
        """
        counts = [tensor for tensor in op.inputs if self.kind_of(tensor) == COUNT]
        values = [value_of(tensor) for tensor in op.inputs if self.kind_of(tensor) == SHARED]
        is_of_all = all(self.kind_of_length(count) == "rows" for count in counts)
        return not (is_of_all and all(v is not None and np.all(v <= 1) for v in values))

    def _joins_samples(self, op: Any, kinds: list[Any]) -> bool:
        """Return whether an operation puts samples behind others, such as fake behind real ones."""
        if axis_of(op, len(kinds) - 1, op.inputs[0].shape.rank) != 0 or BY_SAMPLE not in kinds:
            return False
        # Where the number of samples is known, zeros for each of them are a constant.
        return all(
            kind == BY_SAMPLE or (kind == SHARED and self._are_rows(tensor.shape[0]))
            for tensor, kind in zip(op.inputs[:-1], kinds)
        )

    def _parted(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what samples are that stood behind others, such as real ones before fake ones."""
        value = op.inputs[op.type == "Split"]
        blocks = self._blocks.get(id(value), 1)
        if blocks is None or (op.type != "Split" and self._entries.get(id(value), 1) != 1):
            return None
        if op.type == "StridedSlice":
            parts = self._sliced(op, blocks)
        elif op.type == "SplitV":
            is_along_samples = axis_of(op, 2, value.shape.rank) == 0
            parts = self._sizes(op, value, blocks) if is_along_samples else None
        else:
            number = op.get_attr("num_split")
            is_along_samples = kinds[1] == BY_SAMPLE and axis_of(op, 0, value.shape.rank) == 0
            parts = [blocks / number] * number if is_along_samples else None
        if parts is None or any(part < 1 or part % 1 for part in parts):
            return None
        self._blocks.update((id(o), int(part)) for o, part in zip(op.outputs, parts))
        return BY_SAMPLE

    def _sliced(self, op: Any, blocks: int) -> list[float] | None:
        """Return how many times all samples a slice takes of them, if that is known."""
        value = op.inputs[0]
        masks = map(op.get_attr, ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask"))
        stride = value_of(op.inputs[3])
        if any(mask & 1 for mask in masks) or stride is None or stride[0] != 1:
            return None
        begin = 0 if op.get_attr("begin_mask") & 1 else self._multiple(op.inputs[1], value)
        end = blocks if op.get_attr("end_mask") & 1 else self._multiple(op.inputs[2], value)
        if begin is None or end is None:
            return None
        begin, end = (bound + blocks if bound < 0 else bound for bound in (begin, end))
        # All of them would be those of a slice that stays within.
        return [end - begin] if 0 <= begin < end <= blocks > end - begin else None

    def _sizes(self, op: Any, value: Any, blocks: int) -> list[float] | None:
        """Return how many times all samples the parts of a split have, if that is known."""
        sizes = value_of(op.inputs[1])
        if sizes is None and op.inputs[1].op.type != "Pack":
            return None
        given = op.inputs[1].op.inputs if sizes is None else sizes
        rest = [(value_of(s) if tf.is_tensor(s) else s) == -1 for s in given]
        known = [0 if last else self._multiple(s, value) for s, last in zip(given, rest)]
        if None in known:
            return None
        left = blocks - sum(part for part in known if part is not None)
        return [left if last else part or 0 for part, last in zip(known, rest)]

    def _multiple(self, bound: Any, value: Any) -> float | None:
        """Return how many times all samples a number of entries of `value` is, if it is known.

        Args:
            bound: a number, or a tensor of which the first entry counts.
            value: tensor with samples.
        """
        number = value_of(bound) if tf.is_tensor(bound) else bound
        if number is not None:
            entries = int(np.ravel(number)[0])
            if entries and (self._rows is None or entries % self._rows):
                return None
            return entries // (self._rows or 1)
        op = bound.op
        if op.type == "StridedSlice" and self.kind_of(bound) == COUNT:
            is_alike = self._length.get(id(bound)) == self._length.get(id(value))
            blocks = self._blocks.get(id(bound), 1)
            return float(blocks) if is_alike and blocks is not None else None
        if op.type in ("Mul", "FloorDiv"):
            return self._scaled_multiple(op, value)
        if op.type not in ("Cast", "Identity", "Pack", "Neg", "Sub", "AddV2"):
            return None
        first = self._multiple(op.inputs[0], value)
        if first is None or op.type not in ("Neg", "Sub", "AddV2"):
            return first
        second = 0 if op.type == "Neg" else self._multiple(op.inputs[1], value)
        if second is None:
            return None
        sign = {"Sub": -1, "AddV2": 1}.get(op.type, 0)
        return float((-first if op.type == "Neg" else first) + sign * second)

    def _scaled_multiple(self, op: Any, value: Any) -> float | None:
        """Return what a product or a quotient of such a number and a constant is."""
        scaled, factor = op.inputs
        if op.type == "Mul" and value_of(factor) is None:
            scaled, factor = factor, scaled
        factor = value_of(factor)
        multiple = self._multiple(scaled, value) if factor is not None else None
        if multiple is None or not factor:
            return None
        if op.type == "Mul":
            return multiple * int(factor)
        return multiple // int(factor) if multiple % int(factor) == 0 else None

    def _trusted(self, op: Any, kinds: list[Any], output: Any, inner: list[Reading]) -> str | None:
        if op.type == "Reshape" and id(op.inputs[0]) in self._stacked:
            before, after = op.inputs[0].shape, output.shape
            if after.rank and before[2:].is_fully_defined() and before[2:] == after[1:]:
                self._blocks[id(output)] = before[0]
                return BY_SAMPLE
        return super()._trusted(op, kinds, output, inner)

    def _keeps_apart(self, op: Any, kinds: list[Any]) -> bool:
        return not self._joins_views(op) and super()._keeps_apart(op, kinds)

    def _stacks_views(self, op: Any) -> bool:
        """Return whether a reshape puts views that stand behind one another on an axis."""
        source, after = op.inputs[0], op.outputs[0].shape
        blocks, is_whole = self._blocks.get(id(source), 1), self._entries.get(id(source), 1) == 1
        if blocks in (1, None) or not is_whole or id(source) in self._length or not after.rank:
            return False
        entry = source.shape[1:]
        return bool(entry.is_fully_defined() and after[0] == blocks and after[2:] == entry)

    def _joins_views(self, op: Any) -> bool:
        """Return whether a reshape may join the last samples of one view with the next one's first.

        Entries of unknown length are taken for those of whole samples.
        """
        if op.type != "Reshape" or self._blocks.get(id(op.inputs[0]), 1) == 1:
            return False
        source, before, after = op.inputs[0], op.inputs[0].shape, op.outputs[0].shape
        if before.rank is None or not after.rank or self._stacks_views(op):
            return False
        entries, blocks = self._entries.get(id(source), Fraction(1)), self._blocks[id(source)]
        number = self._multiple(op.inputs[1], source)  # of entries, that of samples being one
        if number is not None and number > 0 and blocks is not None:
            return number % blocks != 0
        if not after[1:].is_fully_defined():
            return False
        least = (entries or 1) * math.prod(length or 1 for length in before[1:])
        return bool(least % (int(after[1:].num_elements()) or 1) != 0)

    def _entries_after(self, op: Any) -> Fraction | None:
        """Return how many entries of axis 0 each sample has after a reshape, None for any."""
        source, before, after = op.inputs[0], op.inputs[0].shape[1:], op.outputs[0].shape[1:]
        entries = self._entries.get(id(source), Fraction(1))
        if entries is None or not (before.is_fully_defined() and after.is_fully_defined()):
            return None
        return entries * Fraction(int(before.num_elements()), int(after.num_elements()) or 1)

    def _reshaped(self, op: Any) -> str | None:
        """Return what samples are whose entries have another shape, in the same order."""
        source, output = op.inputs[0], op.outputs[0]
        before, after = source.shape, output.shape
        shape = tf.get_static_value(op.inputs[1])
        if self._stacks_views(op):
            self._axis[id(output)] = 1
            self._blocks[id(output)] = 1
            self._stacked.add(id(output))
            return INSIDE
        if id(source) in self._blocks:
            self._blocks[id(output)] = self._blocks[id(source)]
        if before.rank is not None and (entries := self._entries_after(op)) != 1:
            self._entries[id(output)] = entries
        if self._rows is not None:
            return BY_SAMPLE if after[0] is not None and after[0] % self._rows == 0 else None
        if after[0] is not None:
            return None
        is_known = before[1:].is_fully_defined() and shape is not None and (shape[1:] > 0).all()
        if not is_known:  # entries of samples, the same number of each
            self._length[id(op.outputs[0])] = ("entries", id(op))
        return BY_SAMPLE
