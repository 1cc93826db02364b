"""The logged numbers of a window: sums over its batches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import tensorflow as tf

from ga_model.replicas import _strategy


class WindowLogs:
    """Sums what `BatchLogs` puts together, over the batches of a window.

    Each replica has its own, as it has metrics of its own.
    """

    def __init__(self) -> None:
        self._num_counted = _strategy.make_variables(lambda: tf.zeros((), tf.int64))
        self._sums: dict[Hashable, Any] = {}

    def num_counted(self) -> tf.Tensor:
        """Return how many microbatches of the window have counted: int64 scalar."""
        return self._num_counted.read_value()

    def count(self, number: Any) -> None:
        """Count microbatches: int64 scalar tensor."""
        self._num_counted.assign_add(number)

    def has(self, key: Hashable) -> bool:
        """Return whether there was a batch with such a vector."""
        return key in self._sums

    def add(self, key: Hashable, vector: tf.Tensor) -> tf.Tensor:
        """Add the vector of a batch, and return the sum of those before: float64.

        Args:
            key: of vectors that are of the same kind.
            vector: the vector.
        """
        if key not in self._sums:
            self._sums[key] = _strategy.make_variables(lambda: tf.zeros(vector.shape, tf.float64))
        before = self._sums[key].read_value()
        self._sums[key].assign_add(vector)
        return before

    def reset(self) -> None:
        """Forget the window."""
        for kept in (self._num_counted, *self._sums.values()):
            kept.assign(tf.zeros_like(kept))
