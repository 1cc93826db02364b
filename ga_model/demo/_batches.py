"""Batches of samples in an order that does not depend on their size."""

from __future__ import annotations

from typing import Any

import keras


def shuffled_batches(x: Any, y: Any, batch_size: int, seed: int) -> Any:
    """Return what `fit` takes: batches of samples that are shuffled before they are cut.

    Args:
        x, y: arrays with an entry of axis 0 for each sample.
        batch_size: samples per batch.
        seed: of the order.
    """
    if keras.backend.backend() == "torch":
        return _of_torch(x, y, batch_size, seed)
    import tensorflow as tf

    x, y = tf.constant(x), tf.constant(y)
    rows = tf.data.Dataset.range(len(x)).shuffle(len(x), seed=seed)
    return rows.batch(batch_size).map(lambda i: (tf.gather(x, i), tf.gather(y, i)))


def _of_torch(x: Any, y: Any, batch_size: int, seed: int) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    samples = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(samples, batch_size=batch_size, shuffle=True, generator=generator)
