"""The statistics of BatchNormalization in a window, and how they update the running averages."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from ga_model.recording._normalization import Call
from ga_model.replicas import _strategy
from ga_model.sums._moments import Moments


class WindowStatistics:
    """Pools what BatchNormalization layers compute over the batches of a window.

    Each replica has its own, as it has running averages of its own.
    """

    def __init__(self) -> None:
        self._strategy = _strategy.current()
        self._pooled: dict[tuple[int, int], tuple[Call, Moments]] = {}  # `Moments` of variables

    def add(self, calls: list[Call], moments: list[Moments]) -> bool:
        """Add those of a batch. Return whether there are calls that no batch before had."""
        has_others = False
        for call, part in zip(calls, moments):
            if call.key not in self._pooled:
                self._pooled[call.key] = call, _nothing_like(part)
                has_others = True
            kept = self._pooled[call.key][1]
            for variable, value in zip(kept, _read(kept).plus(part)):
                variable.assign(value)
        return has_others

    def update(self, condition: Any) -> None:
        """Update the running averages and start again, if `condition`, a bool scalar, holds."""

        def move() -> None:
            for call, kept in self._pooled.values():
                call.move(_read(kept))
            self.reset()

        if self._pooled:
            on_replica = functools.partial(_strategy.run_if, condition, move)
            _strategy.run_on_replicas(self._strategy, on_replica)

    def reset(self) -> None:
        """Forget the window."""
        for _, kept in self._pooled.values():
            for variable in kept:
                variable.assign(tf.zeros_like(variable))


def _nothing_like(part: Moments) -> Moments:
    shapes = [(value.shape, value.dtype) for value in part]
    return Moments(*_strategy.make_variables(lambda: [tf.zeros(*s) for s in shapes]))


def _read(kept: Moments) -> Moments:
    return Moments(*(variable.read_value() for variable in kept))
