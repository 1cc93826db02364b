"""Follow the samples of a batch through the operations of a graph.

There are two readers. A proof takes nothing for granted: what is not known to treat samples one by
one proves nothing. The other one, of layers, looks for what puts samples together, and trusts
operations that are used in many ways, such as a reshape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ga_model.reading._apart import APART, APART_INSIDE
from ga_model.reading._axes import axis_after_slice, chooses, joins_samples, keeps_axis, makes_parts
from ga_model.reading._inner_graphs import BRANCHES, LOOPS, bodies, carried_after, kind_after
from ga_model.reading._kinds import keeps_samples, kind_of_mean, kind_of_shape
from ga_model.reading._one_by_one import is_own, kind_by_parts, kind_in_loop
from ga_model.reading._operations import (
    ALONG_LAST_AXIS,
    BY_SAMPLE,
    COUNT,
    ELEMENTWISE,
    INSIDE,
    LIST,
    MEAN,
    MIXED,
    NUMBER,
    OF_IMAGES,
    OF_MATRICES,
    ONE,
    PARTS,
    PLACES,
    REDUCTIONS,
    SHAPE,
    SHARED,
    SUM,
    axes_of,
    compares,
    has_fixed_seed,
    letters_of,
    makes_key,
    values_of,
)


class Reading:
    """What the tensors of a graph are to samples.

    Args:
        graph: of a function whose arguments are tensors with samples.
        trusts_layers: whether operations that may keep samples apart do so, as in layers.
        rows: the number of samples, if it is known while the graph is made.
        normalizing: names of layers whose means over samples are another matter.
        arguments: what the inputs of the graph are to samples, if it is one inside another.

    Attributes:
        unknown: operations of layers on samples that are not known to keep these apart.
    """

    def __init__(
        self,
        graph: Any,
        trusts_layers: bool = False,
        rows: int | None = None,
        normalizing: Sequence[str] = (),
        arguments: Sequence[str | None] | None = None,
    ) -> None:
        self._graph = graph
        self._trusts_layers = trusts_layers
        self._rows = rows
        self._normalizing = normalizing
        self._axis: dict[int, int] = {}  # of the samples, where it is not the first and is known
        self.unknown: list[Any] = []
        self._parts_of_samples: set[int] = set()  # tensors with several entries of axis 0 for each
        self._number = 0  # of operations that were read
        if arguments is not None:
            known = zip(graph.inputs, arguments)
            self._known = {id(tensor): kind for tensor, kind in known if kind is not None}
            self.update()
            return
        inner = {id(inner) for _, inner in graph.captures}
        own = [t for t in graph.inputs if id(t) not in inner]
        self._known = {id(t): BY_SAMPLE if t.shape.rank else SHARED for t in own}
        self.update()

    def update(self) -> None:
        """Read what has come to the graph."""
        for outer, inner in self._graph.captures:
            if outer.dtype == tf.resource or not tf.is_symbolic_tensor(outer):
                self._known.setdefault(id(inner), SHARED)
        operations = self._graph.get_operations()  # each behind those that it depends on
        for op in operations[self._number :]:
            try:
                self._read(op)
            except Exception:  # of an operation that is not what a rule takes it for
                self._note_unknown(op)
        self._number = len(operations)

    def _note_unknown(self, op: Any) -> None:
        """Take it that an operation may put samples together."""
        self.unknown.append(op)
        self._known.update((id(output), MIXED) for output in op.outputs)

    def proves(self, tensor: Any) -> bool:
        """Return whether a tensor has a value for each sample, or is a mean of such values."""
        return self.kind_of(tensor) == (BY_SAMPLE if tensor.shape.rank else MEAN)

    def kind_of(self, tensor: Any) -> str | None:
        """Return what a tensor is to samples, or None if it is not known."""
        return self._known.get(id(tensor))

    def of_outputs(self) -> list[str | None]:
        """Return what the outputs of the graph are."""
        return [self.kind_of(tensor) for tensor in self._graph.outputs]

    def _read(self, op: Any) -> None:
        kinds = [self._known.get(id(tensor)) for tensor in op.inputs]
        if op.type == "Placeholder":
            return
        is_readable = not {None, INSIDE, LIST, MIXED, NUMBER, ONE, PARTS, PLACES} & set(kinds)
        kind = self._kind(op, kinds) if is_readable else None
        if op.type in REDUCTIONS and self._is_normalizing(op):
            kind = SHARED
        has_inner = self._trusts_layers and bool(kinds and op.outputs)
        inner = self._inner(op, kinds) if has_inner else []
        for output in op.outputs:
            trusted = self._trusted(op, kinds, output, inner) if self._trusts_layers else None
            if found := kind or trusted:
                self._known[id(output)] = found
            if any(id(t) in self._parts_of_samples for t in op.inputs) or makes_parts(op):
                self._parts_of_samples.add(id(output))

    def _kind(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what the outputs of an operation are, or None if it is not known."""
        if all(kind == SHARED for kind in kinds):
            is_random = "Random" in op.type or (op.op_def is not None and op.op_def.is_stateful)
            return SHARED if not is_random or op.type == "ReadVariableOp" else None
        if op.type in ("Shape", "Size") and kinds[0] == BY_SAMPLE:
            return SHAPE if op.type == "Shape" else COUNT
        if SHAPE in kinds or COUNT in kinds:
            return kind_of_shape(op, kinds)
        if MEAN in kinds or SUM in kinds:
            return kind_of_mean(op, kinds)
        if keeps_samples(op, kinds):
            return BY_SAMPLE
        is_over_samples = op.type in REDUCTIONS and 0 in (axes_of(op) or ())
        return {"Mean": MEAN, "Sum": SUM}.get(op.type) if is_over_samples else None

    def _trusted(self, op: Any, kinds: list[Any], output: Any, inner: list[Reading]) -> str | None:
        """Return what an output most probably is, of an operation that is not known."""
        if op.type in ("Shape", "ShapeN", "Size", "Rank") or not kinds:
            # How many entries are chosen of all samples.
            return MIXED if MIXED in kinds and op.type != "Rank" else None
        if PARTS in kinds:
            return kind_by_parts(op, kinds)
        if inner:
            return kind_after(op, kinds, output.value_index, [r.of_outputs() for r in inner])
        if (kind := kind_in_loop(op, kinds)) is not None:
            return kind
        if {COUNT, NUMBER} & set(kinds) and set(kinds) <= {COUNT, NUMBER, SHARED}:
            if op.type == "Range":
                return PLACES
            if op.type in ELEMENTWISE and not output.shape.rank:
                return NUMBER
        if PLACES in kinds and not {BY_SAMPLE, INSIDE, MIXED} & set(kinds):
            return None if op.type.startswith("TensorList") else PLACES
        if (
            {MIXED, MEAN, SUM} & set(kinds)
            or compares(op, kinds)
            or self._compares_inside(op, kinds)
        ):
            return BY_SAMPLE if is_own(op, kinds) else MIXED
        if op.type.startswith("TensorList") and op.type != "TensorListLength":
            return self._of_list(op, kinds, output)
        if not self._keeps_apart(op, kinds):
            self.unknown.append(op)
            return MIXED
        if (axis := self._axis_after(op, kinds)) is not None:
            if axis:
                self._axis[id(output)] = axis
            return INSIDE if axis else BY_SAMPLE
        rank, is_known = output.shape.rank, {BY_SAMPLE, INSIDE} & set(kinds)
        if not rank:
            is_number = op.type in REDUCTIONS or output.dtype.is_floating
            return MIXED if is_known and is_number else None
        if op.type == "Transpose" and is_known:
            stays = values_of(op, 1)[:1] == [0]
            return INSIDE if stays == (kinds[0] == INSIDE) else BY_SAMPLE
        if INSIDE in kinds and op.type in ELEMENTWISE:
            return INSIDE
        is_drawn = "Random" in op.type and not makes_key(op)
        is_random = is_drawn and (SHAPE in kinds or self._rows is not None)
        lengths = [t.shape[0] for t, k in zip(op.inputs, kinds) if k == BY_SAMPLE]
        if is_random and self._are_rows(output.shape[0]):
            return MIXED if has_fixed_seed(op) else BY_SAMPLE
        if is_known and output.shape[0] in (self._rows, *lengths):  # of several views perhaps
            return BY_SAMPLE
        return INSIDE if is_known else None

    def _keeps_apart(self, op: Any, kinds: list[Any]) -> bool:
        """Return whether an operation is known to keep samples apart, where they are."""
        if op.type == "Reshape" and kinds[0] == BY_SAMPLE:
            # Longer entries of axis 0 have several samples, unless these were in parts.
            return not joins_samples(op) or id(op.inputs[0]) in self._parts_of_samples
        if op.type == "Reshape" and INSIDE in kinds:
            axis = self._axis.get(id(op.inputs[0]))
            return axis is None or keeps_axis(op, axis)
        if kinds and kinds[0] == INSIDE:
            return op.type in APART_INSIDE
        return not {BY_SAMPLE, INSIDE} & set(kinds) or op.type in APART

    def _of_list(self, op: Any, kinds: list[Any], output: Any) -> str | None:
        """Return what a list of a loop is to samples, as each tensor in it, or such a tensor."""
        if op.type == "TensorListFromTensor":
            return {BY_SAMPLE: LIST, INSIDE: BY_SAMPLE, PLACES: MIXED}.get(kinds[0])
        if kinds[0] == LIST:
            return BY_SAMPLE if op.type == "TensorListStack" else MIXED
        if op.type in ("TensorListSetItem", "TensorListPushBack"):
            return kinds[-1] if kinds[-1] == BY_SAMPLE else None
        if kinds[0] != BY_SAMPLE:
            return None
        if op.type in ("TensorListStack", "TensorListConcatV2"):
            self._axis[id(output)] = 1
            return INSIDE
        return BY_SAMPLE

    def _are_rows(self, length: int | None) -> bool:
        """Return whether a length of axis 0 may be that of samples, or of several for each."""
        if self._rows is None:
            return length is None
        return length is not None and length % self._rows == 0

    def _is_normalizing(self, op: Any) -> bool:
        parts = op.name.split("/")
        return any(
            part == n or part.startswith(f"{n}_") for part in parts for n in self._normalizing
        )

    def _inner(self, op: Any, kinds: list[Any]) -> list[Reading]:
        """Return readings of the function, the branches or the loop that an operation runs."""
        graphs = bodies(op)

        def read(arguments: list[str | None]) -> list[Reading]:
            return [Reading(g, True, self._rows, self._normalizing, arguments) for g in graphs]

        arguments = kinds[int(op.type in BRANCHES) :]
        readings = read(arguments)
        while op.type in LOOPS and readings:  # what an iteration gives, the next one begins with
            before, arguments = arguments, carried_after(arguments, readings[0].of_outputs())
            if arguments == before:
                break
            readings = read(arguments)
        self.unknown += [unknown for reading in readings for unknown in reading.unknown]
        return readings

    def _compares_inside(self, op: Any, kinds: list[Any]) -> bool:
        """Return whether an operation computes along an axis that is known to be the samples'."""
        axes = [self._axis_of_samples(t, kind) for t, kind in zip(op.inputs, kinds)]
        if all(axis is None for axis in axes):
            return False
        rank = op.inputs[0].shape.rank
        place = int(op.type == "Split")
        if (axis := axes[place]) and chooses(op, axis):
            return True
        if op.type in (*REDUCTIONS, "Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2"):
            return axes[0] is not None and axes[0] in (axes_of(op) or ())
        if op.type in ALONG_LAST_AXIS:
            return bool(axes[0] == rank - 1)
        if op.type in OF_MATRICES or "FFT" in op.type:
            number = 2 if op.type in OF_MATRICES else int((re.findall(r"\d", op.type) or [1])[0])
            return any(
                axis is not None and axis >= tensor.shape.rank - number
                for tensor, axis in zip(op.inputs, axes)
            )
        if op.type in OF_IMAGES or op.type == "Conv3D":
            return bool(axes[0])
        if op.type in ("BatchMatMulV2", "BatchMatMulV3"):
            left = rank - (2 if op.get_attr("adj_x") else 1)
            right = op.inputs[1].shape.rank - (1 if op.get_attr("adj_y") else 2)
            if axes[0] == left or axes[1] == right:
                return True
            return None not in axes and axes[0] != axes[1]
        if op.type == "Einsum":
            letters, outputs = letters_of(op)
            if letters is None:
                return False
            of_samples = {part[axis] for part, axis in zip(letters, axes) if axis is not None}
            return len(of_samples) > 1 or not of_samples <= set(outputs)
        return False

    def _axis_of_samples(self, tensor: Any, kind: Any) -> int | None:
        return 0 if kind == BY_SAMPLE else self._axis.get(id(tensor))

    def _axis_after(self, op: Any, kinds: list[Any]) -> int | None:
        """Return the axis on which an operation leaves the samples, where that is known."""
        axes = [self._axis_of_samples(t, kind) for t, kind in zip(op.inputs, kinds)]
        known = [axis for axis in axes if axis is not None]
        if not known or not op.outputs or op.outputs[0].shape.rank is None:
            return None
        rank = op.inputs[0].shape.rank
        if op.type == "Transpose" and axes[0] is not None:
            order = values_of(op, 1)
            return order.index(axes[0]) if order else None
        if op.type == "StridedSlice" and axes[0]:
            return axis_after_slice(op, axes[0])
        if op.type == "Pack" and rank is not None and len(set(axes)) == 1:
            return int(axes[0] + (op.get_attr("axis") % (rank + 1) <= axes[0]))
        if op.type == "Unpack" and axes[0] and rank is not None:
            return int(axes[0] - (op.get_attr("axis") % rank < axes[0]))
        if op.type == "ExpandDims" and axes[0] is not None and (new := axes_of(op)):
            return axes[0] + (new[0] <= axes[0])
        if op.type == "Squeeze" and axes[0] is not None and rank is not None:
            gone = [axis % rank for axis in op.get_attr("squeeze_dims")]
            return axes[0] - sum(axis < axes[0] for axis in gone) if gone else None
        if op.type == "Einsum":
            letters, outputs = letters_of(op)
            if letters is None:
                return None
            of_samples = [part[axis] for part, axis in zip(letters, axes) if axis is not None]
            return outputs.find(of_samples[0])
        if op.type in ALONG_LAST_AXIS and len(op.outputs) == 1:
            return axes[0]
        if op.type in ("BatchMatMulV2", "BatchMatMulV3") and axes[0] is not None:
            return axes[0]
        if op.type in ELEMENTWISE and len(set(known)) == 1 and known[0]:
            ranks = {t.shape.rank for t, axis in zip(op.inputs, axes) if axis is not None}
            return known[0] if ranks == {op.outputs[0].shape.rank} else None
        is_alike = axes[0] and rank == op.outputs[0].shape.rank
        return axes[0] if is_alike and op.type != "Reshape" else None
