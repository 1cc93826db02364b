"""Read from the graph of a step what its losses average over.

A step of the user's own takes gradients of a tensor of its own. A microbatch of it has to be
weighted by what that tensor averages over, and here is found out what it is: a mean over samples is
divided by their number, a masked mean by a sum of the mask, and a sum by nothing. Anything that is
no such quotient, and no sum of some with equal denominators, can not be put together from
microbatches.

Reading follows the operations from the samples to the loss, and takes what layers compute to keep
samples apart (`_reading`). What has been reduced over the samples may then be scaled and added
up. Everything else mixes samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ga_model.reading._operations import (
    BY_SAMPLE,
    COUNT,
    MEAN,
    MIXED,
    SHAPE,
    SHARED,
    STRUCTURAL,
    SUM,
    axes_of,
    axis_of,
    names,
    value_of,
)
from ga_model.reading._reading import Reading

_TERMS = "a sum of terms that are divided by different things"
_BOUND = "a sum over samples, and at least some number"
_CHOSEN = "the places of some of the samples"

_REDUCED = (MEAN, SUM, _TERMS)
_SUMS = names("Add AddN AddV2 Cast Mean Neg Sub Sum")
_READS_WEIGHTS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class Denominator(NamedTuple):
    """What a term of a loss is divided by.

    Attributes:
        kind: denominators of equal kind are proportional to one another, in all microbatches.
        count: scalar tensor, what the term counts, or None: it is a sum.
        divisor: scalar tensor, what it was divided by, where that is more than the count.
        once: scalar tensor, what the full batch adds to the count once.
        others: counts of other terms of this kind, which may be those of another part of the batch.
    """

    kind: Hashable
    count: Any = None
    divisor: Any = None
    once: Any = None
    others: tuple[Any, ...] = ()

    @property
    def of_loss(self) -> str:
        """What a term with this denominator is to the samples: a mean or a sum."""
        return SUM if self.count is None else MEAN

    def counts(self) -> list[Any]:
        """Return the counts of all terms of this kind."""
        return [count for count in (self.count, *self.others) if count is not None]

    def words(self) -> str:
        """Return what it is, for a message."""
        name = self.kind[0] if isinstance(self.kind, tuple) else self.kind
        words = {
            "rows": "the samples",
            "chosen": "the entries that a mask chooses",
            "entries": "the entries of the samples",
            "sum of weights": "a sum of weights",
            "mean of weights": "a mean of weights",
            "sum": "nothing, as it is a sum",
        }
        return words.get(str(name), "what a compiled loss averages over")


_OF_SUM = Denominator("sum")
OF_WEIGHTS = Denominator("weights alone")


def by_kind(denominators: Iterable[Denominator]) -> dict[Hashable, Denominator]:
    """Return the first denominator of each kind, with the counts of the others."""
    found: dict[Hashable, Denominator] = {}
    for denominator in denominators:
        first = found.setdefault(denominator.kind, denominator)
        counts = {id(c): c for d in (first, denominator) for c in d.counts()}
        others = tuple(counts.values())[first.count is not None :]
        found[first.kind] = first._replace(others=others)
    return found


class StepLoss(NamedTuple):
    """What is known of a tensor of which a step takes the gradient.

    Attributes:
        denominators: those of its terms, each once; or None, if it is not known.
        mixing: the operation that mixes samples, if there is one.
    """

    denominators: list[Denominator] | None
    mixing: Any = None


class StepReading(Reading):
    """What the tensors of a step are to its samples.

    Args:
        graph: that the step is drawn in. It may grow: `of` reads what has come.
        rows: samples of the microbatch, if that is known while the graph is made.
        normalizing: names of BatchNormalization layers.
    """

    def __init__(self, graph: Any, rows: int | None, normalizing: list[str]) -> None:
        self._denominators: dict[int, dict[Hashable, Denominator]] = {}
        self._length: dict[int, Hashable] = {}  # of axis 0, where it is not that of the samples
        self._blocks: dict[int, int] = {}  # of samples behind one another, where it is not one
        self._mixing: dict[int, Any] = {}
        self._base: dict[int, tuple[Any, Any]] = {}  # of bounds: the sum, what is added to it
        self._of_weights: set[int] = set()
        self._rows_tensor: Any = None
        self._noted: dict[int, tuple[str, dict[Hashable, Denominator]]] = {}
        super().__init__(graph, True, rows, normalizing)

    def note(self, tensor: Any, denominator: Denominator) -> None:
        """Take it as known what a scalar is divided by."""
        self._take(tensor, denominator.of_loss, {denominator.kind: denominator})

    def note_samples(self, tensor: Any) -> None:
        """Take it as known that a tensor has an entry of axis 0 for each sample."""
        self._take(tensor, BY_SAMPLE, {})

    def _take(self, tensor: Any, kind: str, denominators: dict[Hashable, Denominator]) -> None:
        self._noted[id(tensor)] = (kind, denominators)
        self._known[id(tensor)], self._denominators[id(tensor)] = kind, denominators
        self._mixing.pop(id(tensor), None)

    def of(self, tensor: Any) -> StepLoss:
        """Return what a tensor of which the gradient is taken is divided by."""
        self.update()
        kind = self.kind_of(tensor)
        if kind == BY_SAMPLE:
            return StepLoss([_OF_SUM])  # a tape sums what is no scalar
        if kind in _REDUCED:
            return StepLoss(list(self._denominators[id(tensor)].values()))
        if kind == SHARED:
            return StepLoss([])
        return StepLoss(None, self._mixing.get(id(tensor)) if kind == MIXED else None)

    # What is read, operation by operation.

    def _read(self, op: Any) -> None:
        if op.type in _READS_WEIGHTS:
            self._of_weights.update(id(o) for o in op.outputs if o.dtype.is_floating)
        elif op.type != "StopGradient" and any(id(t) in self._of_weights for t in op.inputs):
            self._of_weights.update(id(output) for output in op.outputs)
        if op.type == "IteratorGetNext":
            self._known.update((id(o), BY_SAMPLE if o.shape.rank else SHARED) for o in op.outputs)
        super()._read(op)
        if op.type == "StopGradient" and self._known.get(id(op.inputs[0])) == MIXED:
            self._take(op.outputs[0], _TERMS, {})  # whatever it is, no gradient goes there
        for output in op.outputs:
            if id(output) in self._noted:
                self._known[id(output)], self._denominators[id(output)] = self._noted[id(output)]
            kind = self._known.get(id(output))
            if kind in _REDUCED and id(output) not in self._denominators:
                self._denominators[id(output)] = self._inherited(op)
            if kind == MIXED:
                inherited = [self._mixing[id(t)] for t in op.inputs if id(t) in self._mixing]
                self._mixing[id(output)] = (inherited or [op])[0]
            if kind in (BY_SAMPLE, SHAPE, COUNT):
                lengths = [self._length[id(t)] for t in op.inputs if id(t) in self._length]
                if lengths:
                    self._length.setdefault(id(output), lengths[0])
                length = self._length.get(id(output))
                alike = [t for t in op.inputs if self._length.get(id(t)) == length]
                blocks = [self._blocks[id(t)] for t in alike if id(t) in self._blocks]
                if blocks and op.type != "Reshape":
                    self._blocks.setdefault(id(output), blocks[0])

    def _inherited(self, op: Any) -> dict[Hashable, Denominator]:
        return by_kind(
            denominator
            for tensor in op.inputs
            for denominator in self._denominators.get(id(tensor), {}).values()
        )

    def _kind(self, op: Any, kinds: list[Any]) -> str | None:
        special = self._reduced(op, kinds)
        return special if special is not None else super()._kind(op, kinds)

    def _reduced(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what an operation makes of something that is reduced over samples, or None.

        Also of the numbers of samples, and of places.
        """
        if not op.outputs:
            return None
        output = op.outputs[0]
        if op.type == "Where" and kinds == [BY_SAMPLE]:
            self._length[id(output)] = ("chosen", id(op))
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
        if COUNT in kinds and set(kinds) <= {COUNT, SHARED}:
            return COUNT if op.type in ("Mul", "Maximum", "Cast", "Identity", "Prod") else None
        if op.type == "Reshape" and kinds[0] == BY_SAMPLE and output.shape.rank:
            return self._reshaped(op)
        if op.type == "ConcatV2" and self._joins_samples(op, kinds):
            lengths = {self._length.get(id(tensor)) for tensor in op.inputs[:-1]}
            if len(lengths) > 1:
                self._length[id(output)] = ("joined", id(op))
            else:
                self._blocks[id(output)] = sum(self._blocks.get(id(t), 1) for t in op.inputs[:-1])
            return BY_SAMPLE
        if op.type in ("Split", "StridedSlice") and BY_SAMPLE in kinds[:2]:
            return self._parted(op, kinds)
        if op.type in ("Mean", "Sum") and kinds[0] == BY_SAMPLE:
            return self._reduction(op)
        if not set(kinds) & {*_REDUCED, _BOUND}:
            return None
        return self._of_reduced(op, kinds)

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
        if op.type == "Split":
            number = op.get_attr("num_split")
            if kinds[1] != BY_SAMPLE or axis_of(op, 0, value.shape.rank) or blocks % number:
                return None
            left = blocks // number
        else:
            masks = map(op.get_attr, ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask"))
            begin = 0 if op.get_attr("begin_mask") & 1 else self._number_of_blocks(op, 1)
            end = blocks if op.get_attr("end_mask") & 1 else self._number_of_blocks(op, 2)
            stride = value_of(op.inputs[3])
            if any(mask & 1 for mask in masks) or stride is None or stride[0] != 1:
                return None
            if begin is None or end is None or not 0 <= begin < end <= blocks > end - begin:
                return None
            left = end - begin
        self._blocks.update((id(output), left) for output in op.outputs)
        return BY_SAMPLE

    def _number_of_blocks(self, op: Any, number: int) -> int | None:
        """Return how many times all samples a bound of a slice counts, if that is known."""
        bound = op.inputs[number]
        value = value_of(bound)
        if value is not None:
            if value[0] and (self._rows is None or value[0] % self._rows):
                return None
            return int(value[0]) // (self._rows or 1)
        if self._length.get(id(bound)) != self._length.get(id(op.inputs[0])):
            return None
        while bound.op.type in ("Cast", "Identity", "Pack"):
            bound = bound.op.inputs[0]
        is_length = bound.op.type == "StridedSlice" and self.kind_of(bound) == COUNT
        return self._blocks.get(id(bound), 1) if is_length else None

    def _reshaped(self, op: Any) -> str | None:
        """Return what samples are whose entries have another shape, in the same order."""
        before, after = op.inputs[0].shape, op.outputs[0].shape
        shape = tf.get_static_value(op.inputs[1])
        if self._rows is not None:
            return BY_SAMPLE if after[0] is not None and after[0] % self._rows == 0 else None
        if after[0] is not None:
            return None
        is_known = before[1:].is_fully_defined() and shape is not None and (shape[1:] > 0).all()
        if not is_known:  # entries of samples, the same number of each
            self._length[id(op.outputs[0])] = ("entries", id(op))
        return BY_SAMPLE

    def _reduction(self, op: Any) -> str | None:
        """Return what a mean or a sum of what samples have is, if it is one over samples."""
        source, output = op.inputs[0], op.outputs[0]
        axes = axes_of(op)
        if axes is None or 0 not in axes:
            return None
        if op.type == "Sum":
            return self._divided(output, _OF_SUM)
        kind: Hashable = self._length.get(id(source), "rows")
        sizes = tf.shape(source, out_type=tf.int64)
        count = sizes[0]
        if None in [source.shape[axis] for axis in axes if axis]:
            kind, count = ("entries", id(op)), tf.reduce_prod(tf.gather(sizes, axes))
        return self._divided(output, Denominator(kind, count))

    def _of_reduced(self, op: Any, kinds: list[Any]) -> str:
        output = op.outputs[0] if op.outputs else None
        denominators = self._inherited(op)
        if op.type in STRUCTURAL:
            if set(kinds) & {BY_SAMPLE, _BOUND}:
                return MIXED
            if op.type == "StopGradient":
                denominators = {}
            return self._kept(op, denominators, kinds)
        if op.type in ("Add", "AddV2", "Maximum") and set(kinds) == {SUM, SHARED}:
            total, other = op.inputs if kinds[0] == SUM else reversed(op.inputs)
            if id(other) not in self._of_weights:
                self._base[id(output)] = (total, other if op.type != "Maximum" else None)
                return _BOUND
        if op.type in ("Cast", "Identity") and kinds == [_BOUND]:
            self._base[id(output)] = self._base[id(op.inputs[0])]
            return _BOUND
        if op.type in _SUMS and set(kinds) <= {*_REDUCED, SHARED}:
            if op.type in ("Mean", "Sum") and kinds[0] == SHARED:
                return MIXED
            shared = [t for t, kind in zip(op.inputs, kinds) if kind == SHARED]
            if op.type not in ("Mean", "Sum") and any(id(t) in self._of_weights for t in shared):
                denominators = {**denominators, OF_WEIGHTS.kind: OF_WEIGHTS}
            return self._kept(op, denominators, kinds)
        if op.type == "Mul" and set(kinds) <= {*_REDUCED, SHARED, COUNT}:
            return self._product(op, kinds, denominators)
        if op.type in ("RealDiv", "DivNoNan", "Div"):
            return self._quotient(op, kinds, denominators)
        return MIXED

    def _kept(self, op: Any, denominators: dict[Hashable, Denominator], kinds: list[Any]) -> str:
        for output in op.outputs:
            self._denominators[id(output)] = denominators
        reduced = [kind for kind in kinds if kind in _REDUCED]
        is_one = len({d.kind for d in denominators.values()}) <= 1 and len(set(reduced)) == 1
        return reduced[0] if is_one else _TERMS

    def _product(self, op: Any, kinds: list[Any], denominators: dict[Hashable, Denominator]) -> str:
        if sum(kind in _REDUCED for kind in kinds) != 1:
            return MIXED
        if COUNT not in kinds:
            return self._kept(op, denominators, kinds)
        count = op.inputs[kinds.index(COUNT)]
        kind = self._length.get(id(count), "rows")
        if set(denominators) == {kind}:  # the sum again, if it is a count of the same part
            return self._divided(
                op.outputs[0], _OF_SUM._replace(others=(*denominators[kind].counts(), count))
            )
        return MIXED

    def _quotient(
        self, op: Any, kinds: list[Any], denominators: dict[Hashable, Denominator]
    ) -> str:
        top, bottom = op.inputs
        output = op.outputs[0]
        if kinds[0] in _REDUCED and kinds[1] == SHARED:
            if kinds[0] == SUM and set(denominators) == {"sum"} and self._is_number(top, bottom):
                return self._divided(output, Denominator("rows", self._constant_rows()))
            return self._kept(op, denominators, kinds)
        if set(denominators) != {"sum"} and kinds != [MEAN, MEAN]:
            return MIXED
        found: Denominator | None = None
        of_top = self._denominators.get(id(top), {})
        if kinds == [SUM, COUNT]:
            kind = self._length.get(id(bottom), "rows")
            found = Denominator(kind, bottom)
        elif id(bottom) in self._of_weights:
            return MIXED
        elif kinds == [SUM, SUM] and set(of_top) == {"sum"}:
            found = Denominator(("sum of weights", id(bottom)), bottom)
        elif kinds == [SUM, _BOUND] and set(of_top) == {"sum"}:
            total, once = self._base[id(bottom)]
            found = Denominator(("sum of weights", id(bottom)), total, bottom, once)
        elif kinds == [MEAN, MEAN] and len(of_top) == 1:
            of_bottom = self._denominators[id(bottom)]
            if set(of_top) == set(of_bottom):
                rows = next(iter(of_bottom.values())).count
                count = tf.cast(bottom, tf.float64) * tf.cast(rows, tf.float64)
                found = Denominator(("mean of weights", id(bottom)), count)
        if found is None:
            return MIXED
        return self._divided(output, found)

    def _divided(self, output: Any, denominator: Denominator) -> str:
        """Note what an output has been divided by, and return what it then is."""
        self._denominators[id(output)] = {denominator.kind: denominator}
        return denominator.of_loss

    def _constant_rows(self) -> Any:
        """Return the number of samples, where it is known, always as the same tensor."""
        if self._rows_tensor is None:
            self._rows_tensor = tf.constant(self._rows, tf.int64)
        return self._rows_tensor

    def _is_number(self, total: Any, divisor: Any) -> bool:
        """Return whether a constant is the number of samples, or of what was summed."""
        value = value_of(divisor)
        if self._rows is None or value is None or np.size(value) != 1:
            return False
        numbers = [self._rows]
        while total.op.type != "Sum" and SUM in map(self.kind_of, total.op.inputs):
            total = next(t for t in total.op.inputs if self.kind_of(t) == SUM)
        if total.op.type == "Sum":
            numbers.append(total.op.inputs[0].shape.num_elements() or self._rows)
        return float(np.reshape(value, ())) in numbers
