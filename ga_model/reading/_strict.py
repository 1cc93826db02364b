"""Prove what the losses of a step average over, where nothing but Keras's own layers is trusted.

The proof of `_reading`, in the graph of a whole step. Of Keras's layers it is taken to be known
what `_reading` takes of them. Everything else, code of the user's in layers too, has to be known
operation by operation. What is not proves nothing, and such a step then runs on the full batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ga_model.reading._following import walk_back
from ga_model.reading._operations import (
    BY_SAMPLE,
    COUNT,
    DIVISIONS,
    INSIDE,
    MEAN,
    SHAPE,
    SHARED,
    SUM,
    has_fixed_seed,
    makes_key,
    names,
    value_of,
    values_of,
)
from ga_model.reading._reading import Reading

_POSITIVE = names("Abs Exp OneHot Relu Sigmoid Softmax Softplus Square")
_KEEP_SIGN = names("Cast ExpandDims Identity Mean Reshape Squeeze StopGradient StridedSlice Sum")
_OF_POSITIVE = names("Add AddV2 Maximum Minimum Mul")  # if all that goes in is
_ENTRIES = "the number of entries of a tensor with samples"


class StrictReading(Reading):
    """What the tensors of a step are to its samples, as far as that is proved.

    Args:
        graph: of the step, whose arguments are the leaves of a microbatch.
        trusted: names of the operations of Keras's own layers.
        drawing: names of the operations that may draw random numbers for each sample.
    """

    def __init__(self, graph: Any, trusted: set[str], drawing: set[str]) -> None:
        self._of_keras = trusted
        self._drawing = drawing
        self._divisor: dict[int, Any] = {}  # of means that are not divided by a number of samples
        # Of tensors with samples, the argument that has as many. Arguments of one number of
        # samples are joined: each points to another one, and the last one to itself.
        self._argument: dict[int, int] = {}
        self._joined: dict[int, int] = {}
        super().__init__(graph)

    def update(self) -> None:
        if not self._joined:
            inner = {id(inner) for _, inner in self._graph.captures}
            own = [t for t in self._graph.inputs if id(t) not in inner and t.shape.rank]
            self._argument = {id(t): id(t) for t in own}
            self._joined = dict(self._argument)
        super().update()

    def of(self, tensor: Any) -> str | None:
        """Return whether a tensor is proved to be a MEAN or a SUM, or to be SHARED, or None."""
        self.update()
        kind = self.kind_of(tensor)
        if kind == BY_SAMPLE and tensor.shape.rank:
            return SUM  # a tape sums what is no scalar
        return kind if kind in (MEAN, SUM, SHARED) and tensor.shape.rank == 0 else None

    def has_one_number(self) -> bool:
        """Return whether all arguments are known to have the same number of samples."""
        return len(set(map(self._root, self._joined))) <= 1

    def _root(self, argument: int) -> int:
        while self._joined[argument] != argument:
            argument = self._joined[argument]
        return argument

    def _read(self, op: Any) -> None:
        self._trusts_layers = op.name in self._of_keras
        super()._read(op)
        if op.type == "Reshape" and self._keeps_entries(op):
            self._known[id(op.outputs[0])] = BY_SAMPLE
        arguments = [self._argument[id(t)] for t in op.inputs if id(t) in self._argument]
        for output in op.outputs:
            kind = self.kind_of(output)
            if arguments and kind in (BY_SAMPLE, INSIDE):
                for argument in arguments:
                    self._joined[self._root(argument)] = self._root(arguments[0])
            if arguments and kind in (BY_SAMPLE, INSIDE, SHAPE, COUNT):
                self._argument[id(output)] = arguments[0]

    def _keeps_entries(self, op: Any) -> bool:
        """Return whether samples have as many entries in another shape."""
        source, shape = op.inputs[0], self._shape(op.inputs[1])
        if self.kind_of(source) != BY_SAMPLE or not shape or shape[0] != -1:
            return False
        sizes = [*source.shape[1:], *shape[1:]]
        is_known = all(size is not None and size > 0 for size in sizes)
        return is_known and math.prod(source.shape[1:]) == math.prod(shape[1:])

    def _shape(self, tensor: Any) -> list[Any]:
        """Return what a shape is: of each axis the length, -1 of samples, or None."""
        value, op = value_of(tensor), tensor.op
        if value is not None:
            return list(np.ravel(value))
        if op.type == "Shape" and op.inputs[0].shape.rank is not None:
            is_by_sample = self.kind_of(op.inputs[0]) == BY_SAMPLE
            return [-1] * is_by_sample + list(op.inputs[0].shape)[is_by_sample:]
        if op.type == "Slice":
            begin, size = values_of(op, 1), values_of(op, 2)
            found = self._shape(op.inputs[0])
            return found[begin[0] : begin[0] + size[0]] if begin and size and size[0] > 0 else []
        if op.type == "ConcatV2":
            parts = [self._shape(part) for part in op.inputs[:-1]]
            return [size for part in parts for size in part] if all(parts) else []
        return []

    def _kind(self, op: Any, kinds: list[Any]) -> str | None:
        if op.type.startswith("StatelessRandom"):
            return self._drawn(op, kinds)
        if op.type == "Prod" and kinds[0] == SHAPE:
            return _ENTRIES
        if op.type == "Size" and kinds == [BY_SAMPLE]:
            return _ENTRIES
        if _ENTRIES in kinds:
            if op.type in ("Cast", "Identity"):
                return _ENTRIES
            return MEAN if op.type in DIVISIONS and kinds == [SUM, _ENTRIES] else None
        if op.type in DIVISIONS and kinds == [SUM, SUM]:
            return self._quotient(op)
        kind = super()._kind(op, kinds)
        if kind != MEAN:
            return kind
        divisors = [self._divisor.get(id(t)) for t, k in zip(op.inputs, kinds) if k == MEAN]
        if any(divisor is not divisors[0] for divisor in divisors):
            return None
        if divisors and divisors[0] is not None:
            self._divisor.update((id(output), divisors[0]) for output in op.outputs)
        return MEAN

    def _drawn(self, op: Any, kinds: list[Any]) -> str | None:
        """Return what numbers are that are drawn from the state of a seed, or that seed."""
        if makes_key(op):
            return SHARED if set(kinds) == {SHARED} else None
        is_drawn = kinds[0] == SHAPE and set(kinds[1:]) == {SHARED} and op.name in self._drawing
        return BY_SAMPLE if is_drawn and not has_fixed_seed(op) else None

    def _quotient(self, op: Any) -> str | None:
        """Return what a sum divided by another one is: a mean, if that one is of the data alone."""
        divisor = op.inputs[1]
        found = walk_back([divisor], self._graph, lambda tensor: True)
        is_of_data = divisor.shape.rank == 0 and all(t.dtype != tf.resource for t in found)
        if not is_of_data or not _is_positive(divisor):  # or parts of it might cancel out
            return None
        self._divisor[id(op.outputs[0])] = divisor
        return MEAN


def _is_positive(tensor: Any) -> bool:
    """Return whether no entry of a tensor is known to be less than zero."""
    op = tensor.op
    if tensor.dtype == tf.bool or op.type in _POSITIVE:
        return True
    if op.type == "Const":
        return bool(np.all(value_of(tensor) >= 0))
    if op.type in _KEEP_SIGN:
        return _is_positive(op.inputs[0])
    return op.type in _OF_POSITIVE and all(map(_is_positive, op.inputs))


def follow_from(graph: Any, tensors: Iterable[Any], handles: set[int], passed: set[str]) -> bool:
    """Return whether tensors of a graph follow from variables.

    Args:
        graph: the graph.
        tensors: the tensors.
        handles: of the variables in the graph, as ids.
        passed: names of operations that may read them.
    """
    found = walk_back(tensors, graph, lambda tensor: tensor.op.name not in passed)
    return any(id(tensor) in handles for tensor in found)
