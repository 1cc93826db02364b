"""Where a microbatch stands."""

from __future__ import annotations

from typing import Any, NamedTuple

from ga_model.hearing import _weights


class Position(NamedTuple):
    """Where in its window a microbatch stands.

    Attributes:
        units: the unit of each optimizer's sum so far, as pairs of optimizer and float64 scalar.
        steps: int64 scalar tensor, `accumulation_steps` of the window.
        num_microbatches: float64 scalar tensor, those that fill the window.
        parts: float64 scalar tensor, a power of two near that.
        is_first: bool scalar tensor, whether no microbatch of the window has counted yet.
        whole: the batch, if it is split.
        is_window: whether the microbatch is all of its window.
        is_update: whether the step runs once per update, whatever replicas there are.
        defers_logs: whether metrics and logs wait for all microbatches of the batch.
        can_be_whole: whether the step may run on the full batch instead.
        must_add_up: whether the loss has to be known to add up over microbatches.
        is_trial: whether the graph is given up when the step is drawn.
    """

    units: list[tuple[Any, Any]]
    steps: Any
    num_microbatches: Any
    parts: Any
    is_first: Any
    whole: _weights.Whole | None
    is_window: bool
    is_update: bool
    defers_logs: bool
    can_be_whole: bool
    must_add_up: bool
    is_trial: bool = False
