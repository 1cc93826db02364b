"""Look at what metrics of the user's own make of samples, while a step is traced.

A metric adds up over microbatches if each of its variables grows by a sum over samples, and each
number that it gives to a `Mean` or a `Sum` is a mean or a sum over samples. What it does is read
from its jaxpr.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ga_model.backends.jax.nests import with_leaves
from ga_model.backends.jax.rows_apart import Grows, MixedError, kinds_of
from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront
from ga_model.base._internals import mask_of, scope_of, set_mask, stateless_scope, value_in
from ga_model.core.messages import metric_message
from ga_model.hearing._metric_calls import MetricCalls, waiting
from ga_model.hearing._metrics_of_user import counts_samples, parts_of

_looking = ThreadValue()  # the recording whose metrics are looked at, or None


@contextlib.contextmanager
def looking_at_metrics(model: Any, recording: Any) -> Iterator[None]:
    """Read in a block what metrics of the user's own do, and tell of what does not add up."""
    parts = [part for metric in model.metrics for part in parts_of(metric)]
    own = [part for part in parts if not counts_samples(part)]
    with _in_front.of(own), _looking.set(recording):
        yield


def _heard(metric: Any, update_state: Callable[..., Any]) -> Callable[..., Any]:
    def update(*args: Any, **kwargs: Any) -> Any:
        recording = _looking.get()
        leaves = jax.tree.leaves((args, kwargs))
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if recording is None or recording.model._has_rule() or not is_traced:
            return update_state(*args, **kwargs)
        kinds, others = _read(metric, update_state, args, kwargs)
        recording.note_kinds(kinds)
        bad = [kind for kind in kinds if kind not in ("mean", "sum", "shared")] + others
        if bad:
            why = str(bad[0]) if isinstance(bad[0], MixedError) else "does not only add to it"
            name, model = metric.name, recording.model.name
            recording.losses.tell(metric_message(name, model, why))
        with _looking.set(None):  # what it holds is a part of it
            return update_state(*args, **kwargs)

    return update


_in_front = InFront("update_state", _heard)


def _read(
    metric: Any, update_state: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[list[Any], list[Any]]:
    """Return what numbers that wait are to the samples, and variables that do not just grow."""
    leaves = jax.tree.leaves((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if len(getattr(leaf, "shape", ()))]
    masks = {i: m for i in places if (m := mask_of(leaves[i])) is not None}
    scope, variables = stateless_scope(), list(metric.variables)
    before = [value_in(scope, variable) for variable in variables]
    number = 0

    def outputs(arrays: list[Any], masks: dict[int, Any]) -> list[Any]:
        nonlocal number
        changed = list(leaves)
        for place, array in zip(places, arrays):
            changed[place] = array
            if place in masks:
                set_mask(array, masks[place])
        own, own_kwargs = with_leaves((args, kwargs), changed)
        calls = MetricCalls()
        with scope_of(variables, before) as inner, waiting(calls):
            with _looking.set(None):
                update_state(*own, **own_kwargs)
            after = [value_in(inner, variable) for variable in variables]
        number = len(calls.updates)
        return [*(update.value for update in calls.updates), *after]

    rows = leaves[places[0]].shape[0] if places else 1
    found = kinds_of(outputs, ([leaves[place] for place in places], masks), rows)
    grown = [Grows(id(value)) for value in before]
    pairs = zip(found[number:], grown)
    return found[:number], [k for k, own in pairs if k not in (own, "shared")]
