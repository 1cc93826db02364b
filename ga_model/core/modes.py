"""The mode, the numbers and the structure of a compiled microbatch."""

from __future__ import annotations

from typing import Any, NamedTuple

from ga_model.core.backend_types import Applied
from ga_model.core.proof.verdict import Verdict
from ga_model.core.recorder import Update
from ga_model.core.statistics import Call


class Numbers(NamedTuple):
    """Numbers of a batch that its microbatches know.

    Attributes:
        steps: batches that fill the window.
        num_microbatches: microbatches that do.
        parts: a power of two near that, or that itself where gradients are scaled.
        rows: samples of the batch.
        totals: what the terms of the loss weigh in the batch, or None: that is not needed.
    """

    steps: float
    num_microbatches: float
    parts: float
    rows: float
    totals: list[Any] | None


class Mode(NamedTuple):
    """The settings that a microbatch is compiled for.

    Attributes:
        is_split: whether the microbatch is one of several of its batch, which is known whole.
        is_alone: whether the batch makes an update of its own.
        size: samples of microbatches that calls of layers go by, where the step sees the full
            batch, or None.
        skips: whether a microbatch with NaN or Inf in a gradient is skipped.
        is_measured: whether the noise of gradients is.
        verdict: what was found of a step, or None if it has no code of the user's own.
        is_trial: whether it is only tried if there is memory for it.
    """

    is_split: bool
    is_alone: bool
    size: int | None
    skips: bool
    is_measured: bool
    verdict: Verdict | None = None
    is_trial: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether a microbatch may show what was not tried: of steps that were found exact."""
        return self.verdict is not None and self.verdict.is_watched and not self.is_trial


class Structure(NamedTuple):
    """Facts about a step that tracing a microbatch reveals.

    Attributes:
        applied: the optimizers that the step applies, in their order.
        updates: of metrics that wait for the full batch.
        calls: of BatchNormalization layers.
        own_logs: names of scalars that a step of the user's own logs.
        logs_of_metrics: names of logs that are results of metrics, the metrics, and the keys of
            these results, or None.
    """

    applied: list[Applied]
    updates: list[Update]
    calls: list[Call]
    own_logs: tuple[str, ...] = ()
    logs_of_metrics: tuple[tuple[str, Any, str | None], ...] = ()


class NeedsTotalsError(Exception):
    """What the terms of the loss weigh in the full batch has to be known before."""
