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

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ga_model.reading._denominators import (
    DRAWN,
    HIDDEN,
    NOT_LINEAR,
    OF_GRADIENT,
    OF_SUM,
    OF_WEIGHTS,
    SEVERAL,
    UNKNOWN,
    Denominator,
    Obstacle,
    StepLoss,
)
from ga_model.reading._inner_graphs import BRANCHES, LOOPS, bodies
from ga_model.reading._operations import (
    BY_SAMPLE,
    COUNT,
    MEAN,
    MIXED,
    OPAQUE,
    SHARED,
    SUM,
    has_fixed_seed,
    names,
    number_of,
)
from ga_model.reading._powers import is_product, power_after
from ga_model.reading._reduced import BOUND, REDUCED, SCALE, TERMS, ReducedReading

_WITHOUT_GRADIENT = names("OnesLike Rank Shape ShapeN Size StopGradient ZerosLike")
_READS_WEIGHTS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


Noted = dict[int, tuple[str, dict[Hashable, Denominator]]]  # of tensors by their ids


class StepReading(ReducedReading):
    """What the tensors of a step are to its samples.

    Args:
        graph: that the step is drawn in. It may grow: `of` reads what has come.
        rows, normalizing, arguments, of_weights: as `ReducedReading` takes them.
        noted: what is known of tensors, which the methods that note something add to.
        of_values: whether it is values that are read, and not gradients.
    """

    def __init__(
        self,
        graph: Any,
        rows: int | None,
        normalizing: Sequence[str],
        arguments: Sequence[str | None] | None = None,
        of_weights: Iterable[int] = (),
        noted: Noted | None = None,
        of_values: bool = False,
    ) -> None:
        self._obstacles: dict[int, Obstacle] = {}
        self._noted = {} if noted is None else noted
        super().__init__(graph, rows, normalizing, arguments, of_weights, stops=not of_values)

    def note(self, tensor: Any, denominator: Denominator) -> None:
        """Take it as known what a scalar is divided by."""
        self._take(tensor, denominator.of_loss, {denominator.kind: denominator})

    def note_same(self, tensor: Any, other: Any) -> None:
        """Take it as known that a tensor is to samples what another one is."""
        self.update()
        kind, key = self.kind_of(other), id(other)
        if kind in REDUCED or kind in (BY_SAMPLE, MIXED):
            self._take(tensor, kind, self._denominators.get(key, {}))
        if key in self._obstacles:
            self._obstacles[id(tensor)] = self._obstacles[key]

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
        if kind == COUNT:
            return StepLoss([OF_SUM])  # of ones
        if kind == BY_SAMPLE and id(tensor) not in self._powers:
            return StepLoss([OF_SUM], is_by_sample=True)  # a tape sums what is no scalar
        if kind in REDUCED:
            return StepLoss(list(self._denominators[id(tensor)].values()))
        if kind == BOUND and not self._base[id(tensor)][2]:
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
        elif any(t.dtype == tf.resource for t in op.inputs) and _reads_weights(op):
            self._of_weights.update(id(o) for o in op.outputs if o.dtype.is_floating)
        if op.type == "IteratorGetNext":
            self._known.update((id(o), BY_SAMPLE if o.shape.rank else SHARED) for o in op.outputs)
        super()._read(op)
        is_stopped = op.type == "StopGradient" and self._stops
        if is_stopped and self._known.get(id(op.inputs[0])) == MIXED:
            self._take(op.outputs[0], TERMS, {})  # whatever it is, no gradient goes there
            self._obstacles[id(op.outputs[0])] = self._obstacles[id(op.inputs[0])]
        for output in op.outputs:
            if id(output) in self._noted:
                self._known[id(output)], self._denominators[id(output)] = self._noted[id(output)]
                self._follow_length(op, output)
            kind = self._known.get(id(output))
            if kind in REDUCED and id(output) not in self._denominators:
                self._denominators[id(output)] = self._inherited(op)
        self._follow_powers(op)
        for output in op.outputs:
            if self._known.get(id(output)) == MIXED and id(output) not in self._obstacles:
                inherited = [t for t in op.inputs if id(t) in self._obstacles]
                self._obstacles[id(output)] = (
                    self._obstacles[id(inherited[0])] if inherited else self._obstacle(op)
                )

    def _note_unknown(self, op: Any) -> None:
        super()._note_unknown(op)
        self._obstacles.update((id(output), Obstacle(op, UNKNOWN)) for output in op.outputs)

    def _trusted(self, op: Any, kinds: list[Any], output: Any, inner: list[Any]) -> str | None:
        kind = super()._trusted(op, kinds, output, inner)
        is_loss = kind == MIXED and bool(inner) and output.shape.rank == 0
        is_of_all = set(kinds) <= {BY_SAMPLE, SHARED, None} and op.type not in LOOPS
        return self._reduced_inside(op, kinds, output) if is_loss and is_of_all else kind

    def _reduced_inside(self, op: Any, kinds: list[Any], output: Any) -> str:
        """Return what a scalar is that a function, or a branch of `tf.cond`, has computed."""
        first = int(op.type in BRANCHES)
        tensors, arguments = list(op.inputs)[first:], kinds[first:]
        samples = [t for t, kind in zip(tensors, arguments) if kind == BY_SAMPLE]
        found = []
        for graph in bodies(op):
            pairs = zip(tensors, graph.inputs)
            weights = [id(own) for tensor, own in pairs if id(tensor) in self._of_weights]
            with graph.as_default():  # what is counted there stays there
                args = (graph, self._rows, self._normalizing, arguments, weights)
                reading = StepReading(*args, of_values=not self._stops)
                loss = reading.of(graph.outputs[output.value_index])
            self.by_rows |= reading.by_rows
            if loss.denominators is None:
                self._obstacles[id(output)] = loss.obstacle or Obstacle(op, UNKNOWN)
                return MIXED
            found.append({d.kind for d in loss.denominators})
        is_known = found[0] <= {"rows", "sum", OF_WEIGHTS.kind}
        is_of_all = all(self.kind_of_length(t) == "rows" for t in samples)
        if any(kinds != found[0] for kinds in found) or not (is_known and is_of_all):
            self._obstacles[id(output)] = Obstacle(op, HIDDEN)
            return MIXED
        of_rows = Denominator("rows", tf.shape(samples[0], out_type=tf.int64)[0])
        by_name = {"rows": of_rows, "sum": OF_SUM, OF_WEIGHTS.kind: OF_WEIGHTS}
        denominators: dict[Hashable, Denominator] = {kind: by_name[kind] for kind in found[0]}
        self._denominators[id(output)] = denominators
        return next(iter(denominators.values())).of_loss if len(denominators) == 1 else TERMS

    def _obstacle(self, op: Any) -> Obstacle:
        """Return why what an operation gives is no sum over samples, where its inputs are."""
        kinds = {self._known.get(id(tensor)) for tensor in op.inputs}
        if has_fixed_seed(op):
            return Obstacle(op, DRAWN)
        if op.type in OPAQUE:
            return Obstacle(op, UNKNOWN)
        is_reduced = bool(kinds & {*REDUCED, BOUND}) and BY_SAMPLE not in kinds
        return Obstacle(op, NOT_LINEAR if is_reduced else SEVERAL)

    def _follow_powers(self, op: Any) -> None:
        """Note which outputs are divided by a power of the number of samples."""
        kinds = [self._known.get(id(tensor)) for tensor in op.inputs]
        is_scaling = is_product(op)
        has_counts = is_scaling and COUNT in kinds
        has_powers = any(id(tensor) in self._powers for tensor in op.inputs)
        if not (has_counts or has_powers) or set(kinds) & {*REDUCED, BOUND}:
            return
        known = [self._power_of(tensor, is_scaling) for tensor in op.inputs]
        divisors = {divisor.kind: divisor for _, divisor in known if divisor is not None}
        power = power_after(op, [power for power, _ in known]) if len(divisors) == 1 else None
        is_scaled = power == 1 and op.type == "Mul" and self._rows is not None
        if is_scaled and self._rows in map(number_of, op.inputs):
            power = 0.0
            self.by_rows.add(op)
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
            if kind == SCALE:
                self._known[id(output)] = SHARED
            return
        is_mean_again = kind == MEAN and set(self._denominators[id(output)]) == {divisor.kind}
        if kind == SUM and power == 1.0:
            self._known[id(output)] = self._divided(output, divisor)
        elif is_mean_again and power == -1.0:
            self._known[id(output)] = self._divided(output, OF_SUM)
        elif power is None or kind in REDUCED:
            self._known[id(output)] = MIXED
            self._obstacles[id(output)] = Obstacle(op, OF_GRADIENT)
        else:
            self._powers[id(output)] = (power, divisor)


def _reads_weights(op: Any) -> bool:
    """Return whether a function, a branch or a loop reads variables that may be trained."""
    seen: set[int] = set()
    left = bodies(op)
    while left:
        graph = left.pop()
        if id(graph) in seen:
            continue
        seen.add(id(graph))
        for inner in graph.get_operations():
            if inner.type in _READS_WEIGHTS and any(o.dtype.is_floating for o in inner.outputs):
                return True
            left += bodies(inner)
    return False
