"""Read from the graph of a step what its losses average over.

A step of the user's own takes gradients of a tensor of its own. A microbatch of it has to be
weighted by what that tensor averages over, and here is found out what it is: a mean over samples is
divided by their number, a masked mean by a sum of the mask, and a sum by nothing. Anything that is
no such quotient, and no sum of some with equal denominators, cannot be put together from
microbatches.

Reading follows the operations from the samples to the loss, and takes what layers compute to keep
samples apart (`_reading`). What has been reduced over the samples may then be scaled and added
up. Everything else mixes samples.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from ga_model.reading._denominators import (
    DRAWN,
    NOT_LINEAR,
    OF_GRADIENT,
    OF_SUM,
    OF_WEIGHTS,
    SEVERAL,
    UNKNOWN,
    Denominator,
    Obstacle,
    StepLoss,
    by_kind,
)
from ga_model.reading._operations import (
    BY_SAMPLE,
    COUNT,
    DIVISIONS,
    MEAN,
    MIXED,
    OPAQUE,
    SHARED,
    STRUCTURAL,
    SUM,
    axes_of,
    has_fixed_seed,
    letters_of,
    names,
    number_of,
)
from ga_model.reading._parts import PartsReading
from ga_model.reading._powers import is_product, power_after

_TERMS = "a sum of terms that are divided by different things"
_BOUND = "a sum over samples, and something beside it"
_SCALE = "a number that follows from the number of samples"

_REDUCED = (MEAN, SUM, _TERMS)
_SUMS = names("Add AddN AddV2 Cast Mean Neg Sub Sum")
_WITHOUT_GRADIENT = names("OnesLike Rank Shape ShapeN Size StopGradient ZerosLike")
_READS_WEIGHTS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class StepReading(PartsReading):
    """What the tensors of a step are to its samples.

    Args:
        graph: that the step is drawn in. It may grow: `of` reads what has come.
        rows: samples of the microbatch, if that is known while the graph is made.
        normalizing: names of BatchNormalization layers.
    """

    def __init__(self, graph: Any, rows: int | None, normalizing: list[str]) -> None:
        self._denominators: dict[int, dict[Hashable, Denominator]] = {}
        self._obstacles: dict[int, Obstacle] = {}
        self._base: dict[int, tuple[Any, Any, float | None]] = {}  # of `_BOUND`: see `_bound`
        # Of values that were divided by a number of samples, or by a power of it.
        self._powers: dict[int, tuple[float, Denominator]] = {}
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

    def note_gradient(self, gradient: Any, source: Any, loss: StepLoss) -> None:
        """Note what a tape gave, where that has an entry for each sample.

        Args:
            gradient: tensor.
            source: tensor, with respect to what the gradient is taken.
            loss: of what.
        """
        self.update()
        if self.kind_of(source) != BY_SAMPLE:
            return
        found = loss.denominators
        divisors = [d for d in found or () if d.kind != OF_WEIGHTS.kind]
        if found is None or len(divisors) > 1:
            self._take(gradient, MIXED, {})
            self._obstacles[id(gradient)] = loss.obstacle or Obstacle(gradient.op, OF_GRADIENT)
            return
        self._take(gradient, BY_SAMPLE, {})
        self._take_length(gradient, source)
        self._powers.pop(id(gradient), None)
        if divisors and divisors[0].count is not None:
            self._powers[id(gradient)] = (1.0, divisors[0])

    def _take(self, tensor: Any, kind: str, denominators: dict[Hashable, Denominator]) -> None:
        self._noted[id(tensor)] = (kind, denominators)
        self._known[id(tensor)], self._denominators[id(tensor)] = kind, denominators
        self._obstacles.pop(id(tensor), None)

    def of(self, tensor: Any) -> StepLoss:
        """Return what a tensor of which the gradient is taken is divided by."""
        self.update()
        kind = self.kind_of(tensor)
        if kind == BY_SAMPLE and id(tensor) not in self._powers:
            return StepLoss([OF_SUM])  # a tape sums what is no scalar
        if kind in _REDUCED:
            return StepLoss(list(self._denominators[id(tensor)].values()))
        if kind == _BOUND and not self._base[id(tensor)][2]:
            return self.of(self._base[id(tensor)][0])
        if kind == SHARED:
            return StepLoss([])
        return StepLoss(None, self._obstacles.get(id(tensor)) or self._unknown(tensor))

    def _unknown(self, tensor: Any) -> Obstacle | None:
        """Return the first operation that is not known on the way to a tensor."""
        while True:
            unknown = [t for t in tensor.op.inputs if self.kind_of(t) is None]
            if not unknown:
                return Obstacle(tensor.op, UNKNOWN) if tensor.op.inputs else None
            tensor = unknown[0]

    # What is read, operation by operation.

    def _read(self, op: Any) -> None:
        if op.type in _READS_WEIGHTS:
            self._of_weights.update(id(o) for o in op.outputs if o.dtype.is_floating)
        elif op.type not in _WITHOUT_GRADIENT and any(id(t) in self._of_weights for t in op.inputs):
            self._of_weights.update(id(output) for output in op.outputs)
        if op.type == "IteratorGetNext":
            self._known.update((id(o), BY_SAMPLE if o.shape.rank else SHARED) for o in op.outputs)
        super()._read(op)
        if op.type == "StopGradient" and self._known.get(id(op.inputs[0])) == MIXED:
            self._take(op.outputs[0], _TERMS, {})  # whatever it is, no gradient goes there
            self._obstacles[id(op.outputs[0])] = self._obstacles[id(op.inputs[0])]
        for output in op.outputs:
            if id(output) in self._noted:
                self._known[id(output)], self._denominators[id(output)] = self._noted[id(output)]
                self._follow_length(op, output)
            kind = self._known.get(id(output))
            if kind in _REDUCED and id(output) not in self._denominators:
                self._denominators[id(output)] = self._inherited(op)
        self._follow_powers(op)
        for output in op.outputs:
            if self._known.get(id(output)) == MIXED and id(output) not in self._obstacles:
                inherited = [t for t in op.inputs if id(t) in self._obstacles]
                self._obstacles[id(output)] = (
                    self._obstacles[id(inherited[0])] if inherited else self._obstacle(op)
                )

    def _obstacle(self, op: Any) -> Obstacle:
        """Return why what an operation gives is no sum over samples, where its inputs are."""
        kinds = {self._known.get(id(tensor)) for tensor in op.inputs}
        if has_fixed_seed(op):
            return Obstacle(op, DRAWN)
        if op.type in OPAQUE:
            return Obstacle(op, UNKNOWN)
        is_reduced = bool(kinds & {*_REDUCED, _BOUND}) and BY_SAMPLE not in kinds
        return Obstacle(op, NOT_LINEAR if is_reduced else SEVERAL)

    def _follow_powers(self, op: Any) -> None:
        """Note which outputs are divided by a power of the number of samples."""
        kinds = [self._known.get(id(tensor)) for tensor in op.inputs]
        is_scaling = is_product(op)
        has_counts = is_scaling and COUNT in kinds
        has_powers = any(id(tensor) in self._powers for tensor in op.inputs)
        if not (has_counts or has_powers) or set(kinds) & {*_REDUCED, _BOUND}:
            return
        known = [self._power_of(tensor, is_scaling) for tensor in op.inputs]
        divisors = {divisor.kind: divisor for _, divisor in known if divisor is not None}
        power = power_after(op, [power for power, _ in known]) if len(divisors) == 1 else None
        if power == 1 and op.type == "Mul" and self._rows is not None:
            power = 0.0 if self._rows in map(number_of, op.inputs) else power
        for output in op.outputs:
            if id(output) not in self._noted:
                self._take_power(op, output, power, next(iter(divisors.values())))

    def _power_of(self, tensor: Any, is_factor: bool) -> tuple[float, Denominator | None]:
        """Return by which power of a number of samples a tensor is divided, and by which number."""
        if is_factor and self.kind_of(tensor) == COUNT:
            return -1.0, Denominator(self.kind_of_length(tensor), tensor)
        return self._powers.get(id(tensor), (0.0, None))

    def _take_power(self, op: Any, output: Any, power: float | None, divisor: Denominator) -> None:
        """Take it as known by which power of a number an output is divided, None if by none."""
        kind = self._known.get(id(output))
        if kind in (None, COUNT, MIXED) or power == 0.0:
            if kind == _SCALE:
                self._known[id(output)] = SHARED
            return
        is_mean_again = kind == MEAN and set(self._denominators[id(output)]) == {divisor.kind}
        if kind == SUM and power == 1.0:
            self._known[id(output)] = self._divided(output, divisor)
        elif is_mean_again and power == -1.0:
            self._known[id(output)] = self._divided(output, OF_SUM)
        elif power is None or kind in _REDUCED:
            self._known[id(output)] = MIXED
            self._obstacles[id(output)] = Obstacle(op, OF_GRADIENT)
        else:
            self._powers[id(output)] = (power, divisor)

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
        if set(kinds) & {*_REDUCED, _BOUND}:
            return self._of_reduced(op, kinds)
        if set(kinds) == {COUNT, SHARED} and (bound := self._bound(op, kinds)) is not None:
            return bound
        if {COUNT, _SCALE} & set(kinds) and set(kinds) <= {BY_SAMPLE, COUNT, SHARED, _SCALE}:
            return self._of_scale(op, kinds)
        return None

    def _sums_products(self, op: Any, kinds: list[Any]) -> bool:
        """Return whether an operation multiplies the entries of samples, and sums over these."""
        if op.type == "L2Loss":
            return kinds == [BY_SAMPLE]
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
            scalars = [t for t, kind in zip(op.inputs, kinds) if kind in (COUNT, _SCALE)]
            is_scaled = op.type == "Mul" or (op.type in DIVISIONS and kinds[0] == BY_SAMPLE)
            return BY_SAMPLE if is_scaled and all(t.shape.rank == 0 for t in scalars) else None
        if _SCALE in kinds or (op.type in DIVISIONS and SHARED in kinds):
            return _SCALE
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
            return _BOUND
        if not total.dtype.is_floating:
            return None
        if op.type == "Sub" and not is_first:
            self._base[id(op.outputs[0])] = (total, other, None)
            return _BOUND
        once = -other if op.type == "Sub" else other
        self._base[id(op.outputs[0])] = (total, once, 0.0)
        return _BOUND

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
            if set(kinds) & {BY_SAMPLE, _BOUND}:
                return MIXED
            if op.type == "StopGradient":
                denominators = {}
            return self._kept(op, denominators, kinds)
        if set(kinds) == {SUM, SHARED} and (bound := self._bound(op, kinds)) is not None:
            return bound
        if op.type in ("Cast", "Identity") and kinds == [_BOUND]:
            self._base[id(output)] = self._base[id(op.inputs[0])]
            return _BOUND
        if _BOUND in kinds and op.type in _SUMS and set(kinds) <= {*_REDUCED, SHARED, _BOUND}:
            bases = [self._base[id(t)] for t, kind in zip(op.inputs, kinds) if kind == _BOUND]
            if any(least for _, _, least in bases):
                return MIXED
            totals = [self._denominators[id(total)] for total, _, _ in bases]
            found = by_kind(d for part in (denominators, *totals) for d in part.values())
            self._denominators[id(output)] = found
            return _TERMS
        if op.type in _SUMS and set(kinds) <= {*_REDUCED, SHARED}:
            if op.type in ("Mean", "Sum") and kinds[0] == SHARED:
                return MIXED
            shared = [t for t, kind in zip(op.inputs, kinds) if kind == SHARED]
            if op.type not in ("Mean", "Sum") and any(id(t) in self._of_weights for t in shared):
                denominators = {**denominators, OF_WEIGHTS.kind: OF_WEIGHTS}
            return self._kept(op, denominators, kinds)
        if op.type == "Mul" and set(kinds) <= {*_REDUCED, SHARED, COUNT, _SCALE}:
            return self._product(op, kinds, denominators)
        if op.type in DIVISIONS:
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
        if _SCALE in kinds:
            power, divisor = self._powers[id(op.inputs[kinds.index(_SCALE)])]
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
        if kinds[0] in _REDUCED and kinds[1] == SHARED:
            if kinds[0] == SUM and set(denominators) == {"sum"} and self._is_number(top, bottom):
                return self._divided(output, Denominator("rows", self._constant_rows()))
            return self._kept(op, denominators, kinds)
        if set(denominators) != {"sum"} and kinds != [MEAN, MEAN]:
            return MIXED
        found: Denominator | None = None
        of_top = self._denominators.get(id(top), {})
        if kinds == [SUM, COUNT]:
            kind = self.kind_of_length(bottom)
            found = Denominator(kind, bottom)
        elif id(bottom) in self._of_weights:
            return MIXED
        elif kinds == [SUM, SUM] and set(of_top) == {"sum"}:
            found = Denominator(("sum of weights", id(bottom)), bottom)
        elif kinds == [SUM, _BOUND] and set(of_top) == {"sum"}:
            total, once, least = self._base[id(bottom)]
            if least is None:
                return MIXED
            name = "rows" if self.kind_of(total) == COUNT else "sum of weights"
            found = Denominator((name, id(bottom)), total, bottom, once, least)
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
        if self._rows is None:
            return False
        numbers = [self._rows]
        while total.op.type != "Sum" and SUM in map(self.kind_of, total.op.inputs):
            total = next(t for t in total.op.inputs if self.kind_of(t) == SUM)
        if total.op.type == "Sum":
            numbers.append(total.op.inputs[0].shape.num_elements() or self._rows)
        return number_of(divisor) in numbers
