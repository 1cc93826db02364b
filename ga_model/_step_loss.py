"""Read from the graph of a step what its losses average over.

A step of the user's own takes gradients of a tensor of its own. A microbatch of it has to be
weighted by what that tensor averages over, and here is found out what it is: a mean over samples is
divided by their number, a masked mean by a sum of the mask, and a sum by nothing. Anything that is
no such quotient, and no sum of some with equal denominators, can not be put together from
microbatches.

Reading follows the operations from the samples to the loss, and takes what layers compute to keep
samples apart (`_loss_reading`). What has been reduced over the samples may then be scaled and added
up. Everything else mixes samples.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ga_model._context import graph_being_made
from ga_model._loss_reading import (
    BY_SAMPLE,
    COUNT,
    MEAN,
    MIXED,
    SHAPE,
    SHARED,
    SUM,
    Reading,
    axes_of,
    axis_of,
    names,
    value_of,
)

_TERMS = "a sum of terms that are divided by different things"
_BOUND = "a sum over samples, and at least some number"
_CHOSEN = "the places of some of the samples"

_REDUCED = (MEAN, SUM, _TERMS)
# Of what is reduced, these keep all of it.
_STRUCTURAL = names(
    "BroadcastTo CheckNumerics ConcatV2 EnsureShape ExpandDims Identity IdentityN Pack "
    "PreventGradient Reshape Snapshot Squeeze StopGradient StridedSlice Tile Unpack"
)
_SUMS = names("Add AddN AddV2 Cast Mean Neg Sub Sum")
# Of gradients, these make what the sum over microbatches has made of it, too.
_LINEAR = _STRUCTURAL | _SUMS | names("GatherV2 Pad Slice Split SplitV Transpose")
_PRODUCTS = names("BatchMatMulV2 BatchMatMulV3 Div DivNoNan MatMul Mul RealDiv")
_READS_WEIGHTS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class Denominator(NamedTuple):
    """What a term of a loss is divided by.

    Attributes:
        kind: denominators of equal kind are proportional to one another, in all microbatches.
        count: scalar tensor, what the term counts, or None: it is a sum.
        divisor: scalar tensor, what it was divided by, where that is more than the count.
        once: scalar tensor, what the full batch adds to the count once.
    """

    kind: Hashable
    count: Any = None
    divisor: Any = None
    once: Any = None

    @property
    def of_loss(self) -> str:
        """What a term with this denominator is to the samples: a mean or a sum."""
        return SUM if self.count is None else MEAN

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

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


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
        self._mixing: dict[int, Any] = {}
        self._base: dict[int, tuple[Any, Any]] = {}  # of bounds: the sum, what is added to it
        self._of_weights: set[int] = set()
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
            if kind in (BY_SAMPLE, SHAPE, COUNT) and id(output) not in self._length:
                lengths = [self._length[id(t)] for t in op.inputs if id(t) in self._length]
                if lengths:
                    self._length[id(output)] = lengths[0]

    def _inherited(self, op: Any) -> dict[Hashable, Denominator]:
        found: dict[Hashable, Denominator] = {}
        for tensor in op.inputs:
            found.update(self._denominators.get(id(tensor), {}))
        return found

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
            return BY_SAMPLE
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
        if op.type in _STRUCTURAL:
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
        if set(denominators) == {self._length.get(id(count), "rows")}:  # the sum again
            return self._divided(op.outputs[0], _OF_SUM)
        return MIXED

    def _quotient(
        self, op: Any, kinds: list[Any], denominators: dict[Hashable, Denominator]
    ) -> str:
        top, bottom = op.inputs
        output = op.outputs[0]
        if kinds[0] in _REDUCED and kinds[1] == SHARED:
            if kinds[0] == SUM and set(denominators) == {"sum"} and self._is_number(top, bottom):
                return self._divided(output, Denominator("rows", tf.constant(self._rows, tf.int64)))
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


class HeardGradients:
    """The gradients that the tapes of a step have taken, and of what.

    Args:
        graph: that the step is drawn in, or None: eagerly, nothing is read.
        data: the microbatch.
        model: whose BatchNormalization layers are another matter.
    """

    def __init__(self, graph: Any, data: Any, model: Any) -> None:
        self._model = model
        self._graph = graph
        self._data = data
        self._reading: StepReading | None = None
        self._found: dict[int, StepLoss] = {}  # of a gradient's tensor
        self._gradients: list[Any] = []  # which keeps their ids
        self._first = 0  # operation behind the first of them

    def _reader(self) -> StepReading:
        if self._reading is None:
            leaves = tf.nest.flatten(self._data)
            lengths = {t.shape[0] for t in leaves if isinstance(t, tf.Tensor) and t.shape.rank}
            known = next(iter(lengths)) if len(lengths) == 1 else None
            normal = [layer.name for layer in self._model._batch_normalization_layers()]
            self._reading = StepReading(self._graph, known, normal)
        return self._reading

    def note(self, tensor: Any, denominator: Denominator) -> None:
        """Take it as known what a scalar is divided by."""
        if self._is_here(tensor):
            self._reader().note(tensor, denominator)

    def note_samples(self, outputs: Any) -> None:
        """Take it as known that outputs of a call have an entry of axis 0 for each sample."""
        for tensor in tf.nest.flatten(outputs):
            if self._is_here(tensor) and tensor.shape.rank:
                self._reader().note_samples(tensor)

    def _is_here(self, tensor: Any) -> bool:
        """Return whether a tensor is of the step's graph, and what is drawn now is no other."""
        is_symbolic = tf.is_symbolic_tensor(tensor)
        return is_symbolic and tensor.graph is self._graph is graph_being_made()

    def read(self, tensor: Any) -> StepLoss:
        """Return what a tensor is divided by."""
        leaves = tf.nest.flatten(self._data)
        has_parts = any(isinstance(t, (tf.RaggedTensor, tf.SparseTensor)) for t in leaves)
        if has_parts or not self._is_here(tensor):  # parts of such tensors have no samples
            return StepLoss(None)
        return self._reader().of(tensor)

    def listen(self, target: Any) -> Any:
        """Read what a tape takes the gradient of, and return what takes the gradients."""
        tensors = [t for t in tf.nest.flatten(target) if tf.is_tensor(t)]
        losses = [self.read(tensor) for tensor in tensors]

        def tell(gradients: Any) -> None:
            unlike = [loss for loss in losses if loss.denominators is None]
            found = {d.kind: d for loss in losses for d in loss.denominators or ()}
            whole = unlike[0] if unlike else StepLoss(list(found.values()))
            if self._graph is not None:
                self._first = self._first or len(self._graph.get_operations())
            for gradient in tf.nest.flatten(gradients):
                tensor = getattr(gradient, "values", gradient)
                if self._is_here(tensor):
                    self._found[id(tensor)] = whole
                    self._gradients.append(tensor)

        return tell

    def losses_of(self, gradients: Any) -> list[StepLoss]:
        """Return the losses that some gradients are of, as the tapes gave them or worked over."""
        if self._graph is None:
            return []
        tensors = [getattr(gradient, "values", gradient) for gradient in gradients]
        left = [tensor for tensor in tensors if tensor is not None]
        losses: dict[int, StepLoss] = {}
        seen: set[int] = set()
        while left:
            tensor = left.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            loss = self._found.get(id(tensor))
            if loss is not None:
                losses[id(loss)] = loss
            elif tf.is_symbolic_tensor(tensor) and tensor.graph is self._graph:
                left += tensor.op.inputs
        return list(losses.values())

    def worked_over_by(self, gradients: Any) -> Any:
        """Return the operation by which a step makes of its tapes' gradients what cannot be summed.

        Such as one that clips them. Or None, if they are as the tapes gave them, or scaled, or
        added up, or if nothing is read.
        """
        if not self._found:
            return None
        found: dict[int, Any] = dict.fromkeys(self._found)  # of what comes of gradients
        for op in self._graph.get_operations()[self._first :]:
            touched = [found[id(tensor)] for tensor in op.inputs if id(tensor) in found]
            if touched:
                culprits = [culprit for culprit in touched if culprit is not None]
                is_linear = not culprits and self._is_linear(op, found)
                culprit = None if is_linear else (culprits or [op])[0]
                outputs = [output for output in op.outputs if id(output) not in self._found]
                found.update((id(output), culprit) for output in outputs)
        tensors = [getattr(gradient, "values", gradient) for gradient in gradients]
        return next(filter(None, (found.get(id(tensor)) for tensor in tensors)), None)

    def _is_linear(self, op: Any, found: dict[int, Any]) -> bool:
        """Return whether an operation is linear in the gradients that go into it."""
        others = [tensor for tensor in op.inputs if id(tensor) not in found]
        if op.type in _PRODUCTS:
            is_one = len(others) == 1 and (others[0] is op.inputs[1] or "Div" not in op.type)
            if not is_one:
                return False
        elif op.type not in _LINEAR:
            return False
        reading = self._reader()
        reading.update()
        return all(reading.kind_of(other) == SHARED for other in others)


def line_of(op: Any) -> str:
    """Return the line of the user's that made an operation, or an empty text."""
    frames = [
        frame
        for frame in op.traceback or ()
        if not frame.filename.startswith(_LIBRARIES)
        and f"{os.sep}ga_model{os.sep}" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
