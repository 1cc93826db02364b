"""How a step uses numbers that were reduced over its samples.

A sum over samples that is divided by their number, or by a sum of a mask, is a mean. Such numbers
may be scaled and added up. Everything else that is made of them is no sum over samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ga_model.reading._denominators import OF_SUM, OF_WEIGHTS, Denominator, by_kind
from ga_model.reading._operations import (
    BY_SAMPLE,
    COUNT,
    DIVISIONS,
    INSIDE,
    MEAN,
    MIXED,
    SHARED,
    STRUCTURAL,
    SUM,
    axes_of,
    letters_of,
    names,
    number_of,
)
from ga_model.reading._parts import PartsReading

TERMS = "a sum of terms divided by different things"
BOUND = "a sum over samples plus another term"
SCALE = "a number that depends on the number of samples"
REDUCED = (MEAN, SUM, TERMS)
_SUMS = names("Add AddN AddV2 Cast Mean Neg Sub Sum")


class ReducedReading(PartsReading):
    """What a step divides its sums over samples by.

    Args:
        graph: that the step is drawn in.
        rows: samples of the microbatch, if that is known while the graph is made.
        normalizing: names of BatchNormalization layers.
        arguments: what the inputs of the graph are to samples, if it is one inside another.
        of_weights: ids of tensors that follow from weights.
        stops: whether what `tf.stop_gradient` gives is a constant.
    """

    def __init__(
        self,
        graph: Any,
        rows: int | None,
        normalizing: Sequence[str],
        arguments: Sequence[str | None] | None = None,
        of_weights: Iterable[int] = (),
        stops: bool = True,
    ) -> None:
        self._denominators: dict[int, dict[Hashable, Denominator]] = {}
        self._base: dict[int, tuple[Any, Any, float | None]] = {}  # of `BOUND`: see `_bound`
        # Of values that were divided by a number of samples, or by a power of it.
        self._powers: dict[int, tuple[float, Denominator]] = {}
        self._of_weights = set(of_weights)
        self._stops = stops
        self._rows_tensor: Any = None
        self.by_rows: set[Any] = set()  # operations that take a constant for the number of samples
        super().__init__(graph, True, rows, normalizing, arguments)

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

        Also of the number of samples, and what reduces.
        """
        if not op.outputs:
            return None
        if op.type in ("Mean", "Sum") and kinds[0] == BY_SAMPLE:
            return self._reduction(op)
        if self._sums_products(op, kinds):
            return self._divided(op.outputs[0], OF_SUM)
        if set(kinds) & {*REDUCED, BOUND}:
            return self._of_reduced(op, kinds)
        if set(kinds) == {COUNT, SHARED} and (bound := self._bound(op, kinds)) is not None:
            return bound
        if {COUNT, SCALE} & set(kinds) and set(kinds) <= {BY_SAMPLE, COUNT, SHARED, SCALE}:
            return self._of_scale(op, kinds)
        return None

    def _trusted(self, op: Any, kinds: list[Any], output: Any, inner: list[Any]) -> str | None:
        if op.type == "MatMul" and kinds == [INSIDE, BY_SAMPLE]:
            is_transposed = self._axis.get(id(op.inputs[0])) == 1
            if is_transposed and not (op.get_attr("transpose_a") or op.get_attr("transpose_b")):
                return self._divided(output, OF_SUM)
        return super()._trusted(op, kinds, output, inner)

    def _sums_products(self, op: Any, kinds: list[Any]) -> bool:
        """Return whether an operation multiplies the entries of samples, and sums over these."""
        if op.type == "L2Loss":
            return kinds == [BY_SAMPLE]
        if op.type in ("ScatterNd", "UnsortedSegmentSum"):  # by what each sample says
            is_of_samples = kinds[1] == BY_SAMPLE or (op.type, kinds[1]) == ("ScatterNd", SHARED)
            return kinds[0] == BY_SAMPLE and is_of_samples and kinds[2] == SHARED
        if op.type == "MatMul" and kinds == [BY_SAMPLE, BY_SAMPLE]:
            return bool(op.get_attr("transpose_a") and not op.get_attr("transpose_b"))
        if op.type != "Einsum" or not set(kinds) <= {BY_SAMPLE, SHARED}:
            return False
        letters, output = letters_of(op)
        if letters is None or BY_SAMPLE not in kinds:
            return False
        of_samples = {part[:1] for part, kind in zip(letters, kinds) if kind == BY_SAMPLE}
        others = "".join(p if k == SHARED else p[1:] for p, k in zip(letters, kinds)) + output
        return len(of_samples) == 1 and of_samples.pop() not in others

    def _of_scale(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what an operation makes of numbers that follow from that of the samples."""
        if BY_SAMPLE in kinds:
            scalars = [t for t, kind in zip(op.inputs, kinds) if kind in (COUNT, SCALE)]
            is_scaled = op.type == "Mul" or (op.type in DIVISIONS and kinds[0] == BY_SAMPLE)
            return BY_SAMPLE if is_scaled and all(t.shape.rank == 0 for t in scalars) else None
        if SCALE in kinds or (op.type in DIVISIONS and SHARED in kinds):
            return SCALE
        return None

    def _bound(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what a sum over samples is with something beside it that is the same for all.

        Of such an output, the sum, what is added to it, and what it is at least: None if the sum is
        subtracted, which nothing can be divided by.
        """
        if op.type not in ("Add", "AddV2", "Maximum", "Sub"):
            return None
        is_first = kinds[0] != SHARED
        total, other = op.inputs if is_first else reversed(op.inputs)
        if id(other) in self._of_weights:
            return None
        if op.type == "Maximum":
            least = number_of(other)
            if least is None:
                return MIXED
            if self.kind_of(total) == COUNT and not self.binds(op):
                return None
            self._base[id(op.outputs[0])] = (total, None, max(0.0, least))
            return BOUND
        if not total.dtype.is_floating:
            return None
        if op.type == "Sub" and not is_first:
            self._base[id(op.outputs[0])] = (total, other, None)
            return BOUND
        once = -other if op.type == "Sub" else other
        self._base[id(op.outputs[0])] = (total, once, 0.0)
        return BOUND

    def _reduction(self, op: Any) -> str | None:
        """Return what a mean or a sum of what samples have is, if it is one over samples."""
        source, output = op.inputs[0], op.outputs[0]
        axes = axes_of(op)
        if axes is None or 0 not in axes:
            return None
        if op.type == "Sum":
            return self._divided(output, OF_SUM)
        kind = self.kind_of_length(source)
        sizes = tf.shape(source, out_type=tf.int64)
        count = sizes[0]
        if None in [source.shape[axis] for axis in axes if axis]:
            kind, count = ("entries", id(op)), tf.reduce_prod(tf.gather(sizes, axes))
        return self._divided(output, Denominator(kind, count))

    def _of_reduced(self, op: Any, kinds: list[Any]) -> str:
        output = op.outputs[0] if op.outputs else None
        denominators = self._inherited(op)
        if op.type in STRUCTURAL:
            if set(kinds) & {BY_SAMPLE, BOUND}:
                return MIXED
            if op.type == "StopGradient" and self._stops:
                denominators = {}
            return self._kept(op, denominators, kinds)
        if set(kinds) == {SUM, SHARED} and (bound := self._bound(op, kinds)) is not None:
            return bound
        if op.type in ("Cast", "Identity") and kinds == [BOUND]:
            self._base[id(output)] = self._base[id(op.inputs[0])]
            return BOUND
        if BOUND in kinds and op.type in _SUMS and set(kinds) <= {*REDUCED, SHARED, BOUND}:
            bases = [self._base[id(t)] for t, kind in zip(op.inputs, kinds) if kind == BOUND]
            if any(least for _, _, least in bases):
                return MIXED
            totals = [self._denominators[id(total)] for total, _, _ in bases]
            found = by_kind(d for part in (denominators, *totals) for d in part.values())
            self._denominators[id(output)] = found
            return TERMS
        if op.type in _SUMS and set(kinds) <= {*REDUCED, SHARED}:
            if op.type in ("Mean", "Sum") and kinds[0] == SHARED:
                return MIXED
            shared = [t for t, kind in zip(op.inputs, kinds) if kind == SHARED]
            if op.type not in ("Mean", "Sum") and any(id(t) in self._of_weights for t in shared):
                denominators = {**denominators, OF_WEIGHTS.kind: OF_WEIGHTS}
            return self._kept(op, denominators, kinds)
        if op.type == "Mul" and set(kinds) <= {*REDUCED, SHARED, COUNT, SCALE}:
            return self._product(op, kinds, denominators)
        if op.type in DIVISIONS:
            return self._quotient(op, kinds, denominators)
        return MIXED

    def _kept(self, op: Any, denominators: dict[Hashable, Denominator], kinds: list[Any]) -> str:
        for output in op.outputs:
            self._denominators[id(output)] = denominators
        reduced = [kind for kind in kinds if kind in REDUCED]
        is_one = len({d.kind for d in denominators.values()}) <= 1 and len(set(reduced)) == 1
        return reduced[0] if is_one else TERMS

    def _product(self, op: Any, kinds: list[Any], denominators: dict[Hashable, Denominator]) -> str:
        if sum(kind in REDUCED for kind in kinds) != 1:
            return MIXED
        if SCALE in kinds:
            power, divisor = self._powers[id(op.inputs[kinds.index(SCALE)])]
            is_mean = power == 1.0 and SUM in kinds and set(denominators) == {"sum"}
            return self._divided(op.outputs[0], divisor) if is_mean else MIXED
        if COUNT not in kinds:
            return self._kept(op, denominators, kinds)
        count = op.inputs[kinds.index(COUNT)]
        kind = self.kind_of_length(count)
        if set(denominators) == {kind}:  # the sum again, if it is a count of the same part
            return self._divided(
                op.outputs[0], OF_SUM._replace(others=(*denominators[kind].counts(), count))
            )
        return MIXED

    def _quotient(
        self, op: Any, kinds: list[Any], denominators: dict[Hashable, Denominator]
    ) -> str:
        top, bottom = op.inputs
        output = op.outputs[0]
        if kinds[0] in REDUCED and kinds[1] == SHARED:
            if kinds[0] == SUM and set(denominators) == {"sum"} and self._is_number(top, bottom):
                self.by_rows.add(op)
                return self._divided(output, Denominator("rows", self._constant_rows()))
            return self._kept(op, denominators, kinds)
        if set(denominators) != {"sum"} and kinds != [MEAN, MEAN]:
            return MIXED
        found: Denominator | None = None
        of_top = self._denominators.get(id(top), {})
        if kinds == [SUM, COUNT]:
            kind = self.kind_of_length(bottom)
            found = Denominator(kind, bottom)
        elif id(bottom) in self._of_weights or bottom.shape.num_elements() != 1:
            return MIXED  # one weight serves no vector
        elif kinds == [SUM, SUM] and set(of_top) == {"sum"}:
            kind = ("sum of weights", self._alike.number_of(bottom))
            found = Denominator(kind, _scalar(bottom))
        elif kinds == [SUM, BOUND] and set(of_top) == {"sum"}:
            total, once, least = self._base[id(bottom)]
            if least is None:
                return MIXED
            name = "rows" if self.kind_of(total) == COUNT else "sum of weights"
            numbers = _scalar(total), _scalar(bottom), None if once is None else _scalar(once)
            found = Denominator((name, self._alike.number_of(bottom)), *numbers, least)
        elif kinds == [MEAN, MEAN] and len(of_top) == 1:
            of_bottom = self._denominators[id(bottom)]
            if set(of_top) == set(of_bottom):
                rows = next(iter(of_bottom.values())).count
                count = tf.cast(_scalar(bottom), tf.float64) * tf.cast(rows, tf.float64)
                found = Denominator(("mean of weights", self._alike.number_of(bottom)), count)
        if found is None:
            return MIXED
        if op.type == "DivNoNan" and id(bottom) in self._denominators:
            lost = tf.reduce_all(tf.equal(bottom, 0)) & tf.reduce_any(tf.not_equal(top, 0))
            found = found._replace(is_safe=True, lost=(lost,))
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
        if self._rows is None:
            return False
        numbers = [self._rows]
        while total.op.type != "Sum" and SUM in map(self.kind_of, total.op.inputs):
            total = next(t for t in total.op.inputs if self.kind_of(t) == SUM)
        if total.op.type == "Sum":
            numbers.append(total.op.inputs[0].shape.num_elements() or self._rows)
        return number_of(divisor) in numbers


def _scalar(tensor: Any) -> Any:
    """Return a tensor with one entry as a scalar, whatever axes it has kept."""
    return tensor if tensor.shape.rank == 0 else tf.reshape(tensor, ())
