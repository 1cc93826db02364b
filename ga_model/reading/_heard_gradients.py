"""The gradients that the tapes of a step take, and their way to an optimizer.

A window adds up what the microbatches give to an optimizer. That is the gradient of the full batch
if the step hands gradients on as its tapes gave them, or has made something of them that is linear:
scaled them, added them up, subtracted their mean. What else a step computes of gradients, such as a
norm that it clips by, it would compute of the full batch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from ga_model.base._context import graph_being_made
from ga_model.reading._denominators import Denominator, StepLoss, by_kind
from ga_model.reading._following import walk_back
from ga_model.reading._loss_reading import normalizing_names
from ga_model.reading._numbers_in_code import Numbers, numbers_in
from ga_model.reading._operations import (
    BY_SAMPLE,
    COUNT,
    DIVISIONS,
    MOVES,
    PRODUCTS,
    SHARED,
    names,
    value_of,
)
from ga_model.reading._step_loss import Noted, StepReading

# Linear in all gradients that go in.
_SUMS = names("Add AddN AddV2 ConcatV2 Pack Sub")
# Linear in one gradient, where all else is the same in every microbatch.
_PRODUCTS = PRODUCTS | DIVISIONS
_LINEAR = MOVES | names("MatrixBandPart MatrixBandPartV2")
_CHOICES = names("Select SelectV2")
# Linear in the first input, whatever entries the others put together.
_SCATTERED = names("SegmentSum SegmentSumV2 UnsortedSegmentSum")
OF_SHAPE = names("OnesLike Rank Shape ShapeN Size ZerosLike")


class Work(NamedTuple):
    """What a step has made of gradients that its tapes gave.

    Attributes:
        breaks: the operation that is not linear in them, or None.
        shifts: the operation that adds something that is no gradient, or None.
    """

    breaks: Any = None
    shifts: Any = None


Method = TypeVar("Method", bound=Callable[..., Any])


def _or_unknown(unknown: Any) -> Callable[[Method], Method]:
    """Let a method of `HeardGradients` that fails return something else, and note that."""

    def guarded(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: HeardGradients, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # of a graph that is not what it is taken for
                self.has_failed = True
                return unknown

        return run  # type: ignore[return-value]

    return guarded


class HeardGradients:
    """The gradients that the tapes of a step have taken, and of what.

    Args:
        graph: that the step is drawn in, or None: eagerly, nothing is read.
        data: the microbatch.
        model: whose BatchNormalization layers are another matter.

    Attributes:
        has_failed: whether something of the graph could not be read.
    """

    def __init__(self, graph: Any, data: Any, model: Any) -> None:
        self.has_failed = False
        self._model = model
        self._graph = graph
        self._data = data
        self._readings: dict[bool, StepReading] = {}  # of values, and of gradients
        self._noted: Noted = {}  # by both
        self._found: dict[int, StepLoss] = {}  # of a gradient's tensor
        self._gradients: list[Any] = []  # which keeps their ids
        self._taken: dict[int, tuple[list[Any], list[Any]]] = {}  # of these: targets, and sources
        self._made: list[range] = []  # numbers of operations that took them
        self._first = 0  # operation behind the first of them

    def _reader(self, of_values: bool = False) -> StepReading:
        """Return what reads values, or else gradients: to these, what is stopped is a constant."""
        if of_values not in self._readings:
            names = normalizing_names(self._model)
            self._readings[of_values] = StepReading(
                self._graph, self.known_rows(), names, noted=self._noted, of_values=of_values
            )
        return self._readings[of_values]

    def known_rows(self) -> int | None:
        """Return the samples of the microbatch, if the graph is made for that number alone."""
        leaves = tf.nest.flatten(self._data)
        lengths = {t.shape[0] for t in leaves if isinstance(t, tf.Tensor) and t.shape.rank}
        return next(iter(lengths)) if len(lengths) == 1 else None

    def numbers(self, others: Iterable[Any]) -> Numbers:
        """Return the constants in the step's code that its losses follow from.

        Args:
            others: tensors that losses follow from, beside what tapes took the gradients of.
        """
        numbers = {op.name: i for i, op in enumerate(self._graph.get_operations())}
        targets = [tensor for tensors, _ in self._taken.values() for tensor in tensors]

        def goes_on(tensor: Any) -> bool:
            return not self.has_made(numbers[tensor.op.name])

        def counts(op: Any, tensor: Any) -> bool:
            return any(op in r.by_rows or r.kind_of(tensor) == COUNT for r in self._readers())

        def is_read(tensor: Any) -> bool:
            return any(r.kind_of(tensor) not in (SHARED, COUNT) for r in self._readers())

        return numbers_in(self._graph, [*targets, *others], goes_on, counts, is_read)

    def _readers(self) -> list[StepReading]:
        self._reader()
        return list(self._readings.values())

    @_or_unknown(None)
    def note(self, tensor: Any, denominator: Denominator) -> None:
        """Take it as known what a scalar is divided by."""
        if self._is_here(tensor):
            for reader in self._readers():
                reader.note(tensor, denominator)

    @_or_unknown(None)
    def note_same(self, tensor: Any, other: Any) -> None:
        """Take it as known that a tensor is to samples what another one is."""
        if self._is_here(tensor) and self._is_here(other):
            for reader in self._readers():
                reader.note_same(tensor, other)

    @_or_unknown(None)
    def note_samples(self, outputs: Any) -> None:
        """Take it as known that outputs of a call have an entry of axis 0 for each sample."""
        for tensor in tf.nest.flatten(outputs):
            if self._is_here(tensor) and tensor.shape.rank:
                for reader in self._readers():
                    reader.note_samples(tensor)

    def _is_here(self, tensor: Any) -> bool:
        """Return whether a tensor is of the step's graph, and what is drawn now is no other."""
        is_symbolic = tf.is_symbolic_tensor(tensor)
        return is_symbolic and tensor.graph is self._graph is graph_being_made()

    @_or_unknown(StepLoss(None))
    def read(self, tensor: Any, of_values: bool = False) -> StepLoss:
        """Return what a tensor is divided by, whose gradient is taken, or whose value counts."""
        leaves = tf.nest.flatten(self._data)
        has_parts = any(isinstance(t, (tf.RaggedTensor, tf.SparseTensor)) for t in leaves)
        if has_parts or not self._is_here(tensor):  # parts of such tensors have no samples
            return StepLoss(None)
        return self._reader(of_values).of(tensor)

    @_or_unknown(lambda gradients: None)
    def listen(self, target: Any, sources: Any, upstream: Any = None) -> Any:
        """Read what a tape takes the gradient of, and return what takes the gradients."""
        tensors = [t for t in tf.nest.flatten(target) if tf.is_tensor(t)]
        if upstream is not None and self._graph is not None:  # it is that of a sum of products
            passed = tf.nest.flatten(upstream)
            tensors = [tf.reduce_sum(t * tf.stop_gradient(u)) for t, u in zip(tensors, passed)]
        losses = [self.read(tensor) for tensor in tensors]
        number = 0 if self._graph is None else len(self._graph.get_operations())

        return functools.partial(self._note_gradients, tensors, losses, sources, number)

    @_or_unknown(None)
    def _note_gradients(
        self, tensors: list[Any], losses: list[StepLoss], sources: Any, first: int, gradients: Any
    ) -> None:
        """Note what a tape gave.

        Args:
            tensors: what it has differentiated.
            losses: what these were read to be.
            sources: with respect to what.
            first: number of the first operation that took the gradients.
            gradients: the gradients.
        """
        unlike = [loss for loss in losses if loss.denominators is None]
        found = by_kind(d for loss in losses for d in loss.denominators or ())
        whole = unlike[0] if unlike else StepLoss(list(found.values()))
        taken = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients)))
        if self._graph is not None:
            self._made.append(range(first, len(self._graph.get_operations())))
            self._first = self._first or self._made[0].stop
        for source, gradient in taken:
            tensor = getattr(gradient, "values", gradient)
            if self._is_here(tensor):
                self._found[id(tensor)] = whole
                self._gradients.append(tensor)
                self._taken[id(tensor)] = (tensors, tf.nest.flatten(sources))
            if tf.is_tensor(source) and self._is_here(source) and self._is_here(gradient):
                self._note_gradient(gradient, source, whole)

    def _note_gradient(self, gradient: Any, source: Any, loss: StepLoss) -> None:
        """Let both readers know a gradient with respect to samples, as `note_gradient` does."""
        self._reader().update()
        if self._reader().kind_of(source) == BY_SAMPLE:
            for reader in (self._reader(), self._reader(of_values=True)):
                reader.note_gradient(gradient, source, loss)

    @_or_unknown(None)
    def note_jacobian(self, jacobian: Any, target: Any, source: Any) -> None:
        """Take it as known that a jacobian has an entry of axis 0 for each sample, if both have."""
        if all(map(self._is_here, (jacobian, target, source))):
            for reader in self._readers():
                reader.update()
                if reader.kind_of(target) == reader.kind_of(source) == BY_SAMPLE:
                    reader.note_samples(jacobian)

    def taken_of(self, gradient: Any) -> tuple[Any, list[Any]]:
        """Return of what, and with respect to what, a tape took a gradient: None if of several."""
        tensor = getattr(gradient, "values", gradient)
        targets, sources = self._taken.get(id(tensor), ([], []))
        return (targets[0] if len(targets) == 1 else None), sources

    def has_made(self, number: int) -> bool:
        """Return whether an operation of the graph, by its number, has taken a gradient."""
        return any(number in numbers for numbers in self._made)

    @_or_unknown(())
    def losses_of(self, gradients: Any) -> list[StepLoss]:
        """Return the losses that some gradients are of, as the tapes gave them or worked over."""
        if self._graph is None:
            return []
        tensors = walk_back(
            _tensors_of(gradients), self._graph, lambda tensor: id(tensor) not in self._found
        )
        losses = [self._found[id(tensor)] for tensor in tensors if id(tensor) in self._found]
        return list({id(loss): loss for loss in losses}.values())

    @_or_unknown(Work())
    def work_on(self, gradients: Any) -> Work:
        """Return what the step has made of its tapes' gradients to get these."""
        if not self._found:
            return Work()
        reading = self._reader()
        reading.update()
        known = dict.fromkeys(self._found, Work())  # of all that comes of gradients
        fixed: set[int] = set()  # what follows from their shapes
        for op in self._graph.get_operations()[self._first :]:
            inputs = [id(tensor) for tensor in op.inputs]
            if not any(i in known or i in fixed for i in inputs):
                continue
            outputs = [id(o) for o in op.outputs if id(o) not in self._found]
            is_fixed = [
                i in fixed or reading.kind_of(t) == SHARED for i, t in zip(inputs, op.inputs)
            ]
            if all(is_fixed) or op.type in OF_SHAPE:
                fixed.update(outputs)
            else:
                works = [known.get(i) for i in inputs]
                known.update(dict.fromkeys(outputs, work_by(op, works, is_fixed)))
        return _of_all(known.get(id(tensor), Work()) for tensor in _tensors_of(gradients))


def _tensors_of(gradients: Iterable[Any]) -> list[Any]:
    """Return the tensors of gradients, or of their rows where they are sparse."""
    tensors = [getattr(gradient, "values", gradient) for gradient in gradients]
    return [tensor for tensor in tensors if tensor is not None]


def work_by(op: Any, works: list[Work | None], is_fixed: list[bool]) -> Work:
    """Return what an operation makes of gradients.

    Args:
        op: the operation.
        works: of its inputs, what has been made of those that come of gradients.
        is_fixed: of its inputs, which are the same in every microbatch.
    """
    before = _of_all(work for work in works if work is not None)
    if before.breaks is None and not _is_linear(op, works, is_fixed):
        return before._replace(breaks=op)
    if before.shifts is None and _adds_what_is_fixed(op, is_fixed):
        return before._replace(shifts=op)
    return before


def _of_all(works: Iterable[Work]) -> Work:
    """Return the first operation of each kind."""
    works = list(works)
    breaks = [work.breaks for work in works if work.breaks is not None]
    shifts = [work.shifts for work in works if work.shifts is not None]
    return Work(breaks[0] if breaks else None, shifts[0] if shifts else None)


def _is_linear(op: Any, works: list[Work | None], is_fixed: list[bool]) -> bool:
    """Return whether an operation is linear in gradients, but for a constant that it may add."""
    if op.type in _SCATTERED:
        return works[0] is not None
    if not all(work is not None or fixed for work, fixed in zip(works, is_fixed)):
        return False
    if not all(output.dtype.is_floating or output.dtype.is_complex for output in op.outputs):
        return False
    if op.type in _PRODUCTS:
        is_divided = op.type not in DIVISIONS or works[1] is None
        return is_divided and sum(work is not None for work in works) == 1
    if op.type in _CHOICES:
        return works[0] is None
    return op.type in _SUMS or op.type in _LINEAR


def _adds_what_is_fixed(op: Any, is_fixed: list[bool]) -> bool:
    """Return whether an operation adds something to gradients that is no gradient, and not zero."""
    if op.type in _CHOICES:
        others = list(zip(op.inputs, is_fixed))[1:]
    elif op.type in _SUMS:
        others = list(zip(op.inputs, is_fixed))[: -1 if op.type == "ConcatV2" else None]
    else:
        return False
    return any(fixed and not _is_zero(tensor) for tensor, fixed in others)


def _is_zero(tensor: Any) -> bool:
    value = value_of(tensor)
    return tensor.op.type == "ZerosLike" or (value is not None and not np.any(value))
