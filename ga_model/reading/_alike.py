"""Find tensors of a graph that are computed alike, such as the sum of one mask, taken twice."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_MOST = 256  # operations that are looked at for one tensor


class Alike:
    """Gives tensors of a graph numbers, and the same one to those that are computed alike."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by the id of a tensor
        self._computed: dict[Hashable, int] = {}  # by what computes it

    def number_of(self, tensor: Any) -> int:
        """Return the number of a tensor."""
        left = [tensor]
        for _ in range(_MOST):
            last = left[-1]
            unknown = [t for t in last.op.inputs if id(t) not in self._numbers]
            if unknown and not last.op.op_def.is_stateful:
                left += unknown
                continue
            self._number(left.pop())
            if not left:
                break
        for other in left:  # each is another one, as far as is known
            self._numbers.setdefault(id(other), self._next(("tensor", id(other))))
        return self._numbers[id(tensor)]

    def _number(self, tensor: Any) -> None:
        op = tensor.op
        how: Hashable = ("tensor", id(tensor))
        if not op.op_def.is_stateful and op.type != "Placeholder":
            attributes = sorted(
                (name, value.SerializeToString())
                for name, value in op.node_def.attr.items()
                if not name.startswith("_")
            )
            inputs = [self._numbers[id(t)] for t in op.inputs]
            how = (op.type, tensor.value_index, *inputs, *attributes)
        self._numbers.setdefault(id(tensor), self._next(how))

    def _next(self, how: Hashable) -> int:
        return self._computed.setdefault(how, len(self._computed))
