"""Operations that run other graphs: functions, branches and loops."""

from __future__ import annotations

from typing import Any

from ga_model.base._internals_tf import graph_of_function
from ga_model.reading._operations import (
    BY_SAMPLE,
    COUNT,
    LIST,
    MEAN,
    MIXED,
    NUMBER,
    ONE,
    SHARED,
    SUM,
    names,
    number_of,
)

BRANCHES = names("Case If StatelessCase StatelessIf")
LOOPS = names("StatelessWhile While")
_OF_SEVERAL = frozenset({MIXED, MEAN, SUM})
_OF_ROWS = frozenset({COUNT, NUMBER})
_COMPARISONS = names("Equal Greater GreaterEqual Less LessEqual NotEqual")


def bodies(op: Any) -> list[Any]:
    """Return the graphs that an operation runs, the condition of a loop last."""
    if op.op_def is None:
        return []
    found = [a.name for a in op.op_def.attr if a.type == "func"]
    found.sort(key=lambda name: name == "cond" and op.type in LOOPS)
    graphs = [graph_of_function(op.graph, op.get_attr(name).name) for name in found]
    return [graph for graph in graphs if graph is not None]


def has_loop(graph: Any) -> bool:
    """Return whether a graph, or one that it runs, has a loop."""
    return any(op.type in LOOPS or any(map(has_loop, bodies(op))) for op in graph.get_operations())


def carried_after(kinds: list[str | None], body: list[str | None]) -> list[str | None]:
    """Return what a loop carries into an iteration, from what it began with and what one gave.

    Args:
        kinds: of what it began with.
        body: of what an iteration has made of that.
    """

    def joined(kind: str | None, later: str | None) -> str | None:
        if later in _OF_SEVERAL and kind != LIST:
            return MIXED
        is_of_samples = later in (BY_SAMPLE, NUMBER) and kind in (None, SHARED)
        return later if is_of_samples else kind

    return [joined(*pair) for pair in zip(kinds, body)] + kinds[len(body) :]


def _asks_for_any(condition: Any) -> bool:
    """Return whether a condition on the number of samples is whether there are any."""
    op = condition.op
    while op.type in ("Identity", "LogicalNot"):
        op = op.inputs[0].op
    return op.type in _COMPARISONS and 0 in map(number_of, op.inputs)


def kind_after(
    op: Any, kinds: list[Any], number: int, results: list[list[str | None]]
) -> str | None:
    """Return what an output is that a function, a branch or a loop has computed.

    Args:
        op: the operation that runs it.
        kinds: of its inputs.
        number: of the output.
        results: what each of its graphs gives.
    """
    if op.type in BRANCHES:
        is_by_number = kinds[0] in _OF_ROWS and not _asks_for_any(op.inputs[0])
        if kinds[0] in _OF_SEVERAL or is_by_number:
            return MIXED  # samples choose the branch, or their number
    if op.type in LOOPS:
        (body, *condition) = results
        # The number of samples may be that of iterations only where there is one for each of them.
        chooses = _OF_SEVERAL if LIST in kinds else _OF_SEVERAL | _OF_ROWS
        if any(chooses & set(kinds) for kinds in condition):
            return MIXED
        if LIST in kinds:
            # Where one sample is carried to the next, all that comes of it is mixed.
            is_mixed = bool(_OF_SEVERAL & set(body)) or ONE in body
            return MIXED if is_mixed else body[number] or kinds[number]
        results = [body]
    if ONE in kinds:
        return ONE if set(kinds) <= {None, ONE, SHARED} else MIXED
    found = [kind for given in results for kind in given[number : number + 1]]
    if _OF_SEVERAL & set(found):
        return MIXED
    if len(set(found)) == 1:
        return found[0]
    return BY_SAMPLE if BY_SAMPLE in found else None
