"""Find the numbers that a step's code computes with, in its graph.

Where every batch has the same known number of samples, `x.shape[0]` is a number of Python's. What
code computes with it is a constant of the graph, which nothing tells from one that stands in the
code. But drawn for another number of samples, it is another constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ga_model.reading._following import walk_back
from ga_model.reading._inner_graphs import bodies
from ga_model.reading._operations import DIVISIONS, names, number_of
from ga_model.reading._place import line_of_user

_COMPUTING = DIVISIONS | names("Add AddV2 Maximum Minimum Mul Pow SquaredDifference Sub ")


class Number(NamedTuple):
    """A constant number in a graph.

    Attributes:
        op: the operation that computes with it.
        value: the number.
        counts: whether it is taken for the number of samples, or a multiple of that.
    """

    op: Any
    value: float
    counts: bool


Numbers = dict[str, list[Number]]  # by lines of code


def numbers_in(
    graph: Any,
    tensors: Iterable[Any],
    goes_on: Callable[[Any], bool],
    counts: Callable[[Any, Any], bool],
    is_read: Callable[[Any], bool],
) -> Numbers:
    """Return the constants from which tensors follow, by the lines of the user's that made them.

    Args:
        graph: the graph.
        tensors: the tensors.
        goes_on: function of a tensor that tells whether to go on to what it was computed from.
        counts: function of an operation and an input of it that is a number, which tells whether
            that is taken for a number of samples.
        is_read: function of a number that tells whether what it follows from is known: from
            `tf.shape`, for example.
    """
    found: Numbers = {}
    left = list({t.op.name: t.op for t in walk_back(tensors, graph, goes_on)}.values())
    while left:
        op = left.pop()
        left += [inner for body in bodies(op) for inner in body.get_operations()]
        if op.type not in _COMPUTING or not op.outputs[0].dtype.is_floating:
            continue
        single = [t for t in op.inputs if t.shape.num_elements() == 1 and not is_read(t)]
        values = [(t, value) for t in single if (value := number_of(t)) is not None]
        line = line_of_user(op) if values else None
        if line is not None:
            found.setdefault(line, []).extend(Number(op, v, counts(op, t)) for t, v in values)
    return found


def unlike(numbers: Numbers, drawn: Numbers, times: int) -> Iterator[Number]:
    """Yield numbers that are another for another number of samples, unless they count these.

    And those that are taken to count them, and stay the same.

    Args:
        numbers: of a graph.
        drawn: the same, of a graph for another number of samples.
        times: how many times that number.
    """
    for line, found in numbers.items():
        values = {number.value for number in drawn.get(line, ())}
        for number in found:
            if number.value in values:
                is_unlike = number.counts and number.value * times not in values
            else:
                is_unlike = not number.counts
            if is_unlike:
                yield number
