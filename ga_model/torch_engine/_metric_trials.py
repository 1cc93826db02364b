"""Update a metric with samples, and with these in two parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from ga_model.base._call_again import Attributes
from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront
from ga_model.base._internals import mask_of, set_mask
from ga_model.hearing._metric_calls import MetricCalls, waiting
from ga_model.hearing._metrics_of_user import parts_of
from ga_model.hearing._models import unrecorded
from ga_model.hearing._split import num_rows
from ga_model.torch_engine._probes import is_close

_TOLERANCE = 2e-5  # of the variables of metrics

_calls = ThreadValue()  # the arguments of metrics, by their id, or None


class Arguments(NamedTuple):
    """What a metric is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def num_rows(self) -> int:
        """Return how many samples are among them, 1 if there are none, or it is not known."""
        leaves = [x for x in keras.tree.flatten([*self]) if len(getattr(x, "shape", ()))]
        counts = {num_rows(leaf) for leaf in leaves}
        return counts.pop() if len(counts) == 1 else 1

    def part(self, start: int, stop: int) -> Arguments:
        """Return those of some samples."""

        def part(leaf: Any) -> Any:
            if not len(getattr(leaf, "shape", ())):
                return leaf
            mask, found = mask_of(leaf), leaf[start:stop]
            if mask is not None:
                set_mask(found, mask[start:stop])
            return found

        return Arguments(*keras.tree.map_structure(part, [*self]))

    def halves(self) -> list[Arguments]:
        """Return those of the first half of the samples, and of the second."""
        rows = self.num_rows()
        return [self.part(0, rows // 2), self.part(rows // 2, rows)]


class Outcome(NamedTuple):
    """What updates of a metric have come to.

    Attributes:
        values: numbers for a mean or a sum, in their order.
        state: its variables.
    """

    values: list[Any]
    state: list[Any]

    def is_as(self, other: Outcome) -> bool:
        """Return whether variables are the same but for rounding."""
        pairs = zip(self.state, other.state)
        is_same = all(is_close(one, another, _TOLERANCE) for one, another in pairs)
        return is_same and len(self.state) == len(other.state)


def outcome(metric: Any, calls: Sequence[Arguments]) -> Outcome:
    """Update a metric that has been reset, and leave it as it was."""
    attributes = Attributes(parts_of(metric))
    before = [v.value.detach().clone() for v in metric.variables]
    heard = MetricCalls()
    try:
        with unrecorded(), waiting(heard):
            metric.reset_state()
            for call in calls:
                metric.update_state(*call.args, **call.kwargs)
            state = [v.value.detach().clone() for v in metric.variables]
    finally:
        attributes.put_back()
        for variable, value in zip(metric.variables, before):
            variable.assign(value)
    return Outcome([update.value for update in heard.updates if update.metric is metric], state)


@contextlib.contextmanager
def noting(metrics: list[Any]) -> Iterator[dict[int, list[Arguments]]]:
    """Note in a block what metrics are called with, by their id."""
    found: dict[int, list[Arguments]] = {}
    with _in_front.of(metrics), _calls.set(found):
        yield found


def _noting(metric: Any, update_state: Callable[..., Any]) -> Callable[..., Any]:
    def update(*args: Any, **kwargs: Any) -> Any:
        if (found := _calls.get()) is not None:
            found.setdefault(id(metric), []).append(Arguments(args, kwargs))
        return update_state(*args, **kwargs)

    return update


_in_front = InFront("update_state", _noting)
