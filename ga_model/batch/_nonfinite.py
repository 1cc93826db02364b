"""Undo all traces of a skipped microbatch, whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ga_model.base._internals import is_built, raw
from ga_model.replicas import _strategy


def undone_if_left_out(
    model: Any,
    microbatch: Callable[..., Any],
    traced: Callable[..., Any],
    updated: Callable[[], list[Any]],
) -> Callable[..., Any]:
    """Return `microbatch` so that one that is left out changes no variable.

    Args:
        model: an `AccumulatingModel`.
        microbatch: runs a microbatch, and returns the `Part` that it gave.
        traced: the same, to be traced without being run.
        updated: returns the variables that the last microbatch has updated itself.
    """

    def undone(*args: Any) -> Any:
        if not tf.executing_eagerly() and not is_built(model, model.metrics):
            # What the first call creates has to be there first, and is by tracing it.
            tf.function(traced, autograph=False).get_concrete_function(*args)
        of_tensorflow = [v for v in vars(model).values() if isinstance(v, tf.Variable)]
        variables = [*model.variables, *model.metrics_variables, *of_tensorflow]
        before = [tf.identity(variable) for variable in map(raw, variables)]
        part = microbatch(*args)
        known = {id(variable) for variable in variables}
        created = [m for m in model.metrics if not {id(v) for v in m.variables} <= known]

        def undo() -> None:
            for variable, value in zip([*variables, *updated()], [*before, *part.before]):
                _strategy.own_copy(variable).assign(value)
            for metric in created:
                metric.reset_state()

        _strategy.run_if(tf.equal(part.num_counted, 0), undo)
        return part

    return undone
