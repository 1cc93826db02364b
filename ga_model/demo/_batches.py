"""Batches of samples in an order that does not depend on their size."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


class ShuffledBatches(keras.utils.PyDataset):
    """Batches of samples that are shuffled before they are cut, anew for each epoch.

    Args:
        x, y: arrays with an entry of axis 0 for each sample.
        batch_size: samples per batch.
        seed: of the order.
    """

    def __init__(self, x: Any, y: Any, batch_size: int, seed: int) -> None:
        super().__init__()
        self._x, self._y = x, y
        self._batch_size = batch_size
        self._generator = np.random.default_rng(seed)
        self.on_epoch_end()

    def __len__(self) -> int:
        return -(-len(self._x) // self._batch_size)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        return self._x[rows], self._y[rows]

    def on_epoch_end(self) -> None:
        self._order = self._generator.permutation(len(self._x))
