"""What a microbatch is compiled for, the numbers passed to it, and the facts its trace reveals."""

from __future__ import annotations

from typing import NamedTuple

import keras

from ga_model.base._types import Scalar
from ga_model.core.backend_types import Applied
from ga_model.core.proof.verdict import Verdict
from ga_model.core.recorder import Update
from ga_model.core.statistics import Call


class Numbers(NamedTuple):
    """Numbers of a batch that are passed to its microbatches.

    Attributes:
        steps: batches per window.
        num_microbatches: microbatches per window.
        parts: a power of two near that number, or the number itself if gradients are scaled.
        rows: samples of the batch.
        totals: weights of the loss terms in the batch, or None if they are not needed.
    """

    steps: Scalar
    num_microbatches: Scalar
    parts: Scalar
    rows: Scalar
    totals: list[Scalar] | None


class Mode(NamedTuple):
    """The settings that a microbatch is compiled for.

    Attributes:
        is_split: whether it is one of several microbatches of a batch that no replicas share.
        updates_alone: whether the batch makes an update of its own.
        size: samples per microbatch of layer calls, if the step runs on the full batch, or None.
        skips: whether to skip a microbatch with NaN or Inf in a gradient.
        is_measured: whether to measure gradient noise.
        verdict: the verdict on the step, or None if it has no custom code.
        is_trial: whether this only tries if a size fits in memory.
    """

    is_split: bool
    updates_alone: bool
    size: int | None
    skips: bool
    is_measured: bool
    verdict: Verdict | None = None
    is_trial: bool = False

    @property
    def is_watched(self) -> bool:
        """Whether to watch for news, because the step was tried and found exact."""
        return self.verdict is not None and self.verdict.is_watched and not self.is_trial


class Structure(NamedTuple):
    """Facts about a step that tracing a microbatch reveals.

    Attributes:
        applied: the optimizers that the step applies, in order.
        updates: the delayed updates of metrics.
        calls: calls of BatchNormalization layers.
        own_logs: names of the numbers that a custom step logs.
        logs_of_metrics: names of logs that are results of metrics, with the metric, and the key of
            the result or None. None if they are those of all metrics.
        bounds: smallest weight of a window, for the gradients, each update and each own log.
    """

    applied: list[Applied]
    updates: list[Update]
    calls: list[Call]
    own_logs: tuple[str, ...] = ()
    logs_of_metrics: tuple[tuple[str, keras.Metric, str | None], ...] | None = None
    bounds: tuple[float, ...] = ()


class NeedsTotalsError(Exception):
    """Raised if the weights of the loss terms in the full batch must be computed first."""
