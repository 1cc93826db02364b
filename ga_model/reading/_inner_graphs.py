"""Operations that run other graphs: functions, branches and loops."""

from __future__ import annotations

from typing import Any

from ga_model.base._internals_tf import graph_of_function
from ga_model.reading._operations import BY_SAMPLE, LIST, MEAN, MIXED, ONE, SHARED, SUM, names

BRANCHES = names("Case If StatelessCase StatelessIf")
LOOPS = names("StatelessWhile While")
_OF_SEVERAL = frozenset({MIXED, MEAN, SUM})


def bodies(op: Any) -> list[Any]:
    """Return the graphs that an operation runs, the condition of a loop last."""
    if op.op_def is None:
        return []
    found = [a.name for a in op.op_def.attr if a.type == "func"]
    found.sort(key=lambda name: name == "cond" and op.type in LOOPS)
    graphs = [graph_of_function(op.graph, op.get_attr(name).name) for name in found]
    return [graph for graph in graphs if graph is not None]


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
    if op.type in BRANCHES and kinds[0] in _OF_SEVERAL:
        return MIXED  # samples choose the branch
    if op.type in LOOPS:
        (body, *condition) = results
        if any(_OF_SEVERAL & set(kinds) for kinds in condition):
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
