"""The models of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from ga_model.bench._case import Case, random_ids, random_numbers
from ga_model.bench._names import NAMES
from ga_model.bench._trained_models import TRAINED


def _dense() -> Any:
    """15 million parameters, so that the optimizer takes a large share of the time."""
    hidden = [layers.Dense(2048, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10, "softmax")])


def _convolutional() -> Any:
    def convolution(filters: int) -> Any:
        return layers.Conv2D(filters, 3, padding="same", activation="relu")

    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            convolution(16),
            convolution(16),
            layers.MaxPooling2D(),
            convolution(32),
            convolution(32),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, "softmax"),
        ]
    )


def _transformer() -> Any:
    """A block of attention over 64 tokens, of which each predicts a token."""
    tokens = keras.Input((64,), dtype="int32")
    h = layers.Embedding(1000, 128)(tokens)
    normal = layers.LayerNormalization()(h)
    h = h + layers.MultiHeadAttention(4, 32)(normal, normal, use_causal_mask=True)
    normal = layers.LayerNormalization()(h)
    h = h + layers.Dense(128)(layers.Dense(512, activation="gelu")(normal))
    return keras.Model(tokens, layers.Dense(1000, "softmax")(layers.LayerNormalization()(h)))


def _embedding(most: int, width: int) -> Callable[[], Any]:
    """A table of which a batch uses few rows, so that its gradient is sparse."""

    def make() -> Any:
        ids = keras.Input((32,), dtype="int32")
        mean = layers.GlobalAveragePooling1D()(layers.Embedding(most, width)(ids))
        return keras.Model(ids, layers.Dense(10, "softmax")(layers.Dense(64, "relu")(mean)))

    return make


def _tiny() -> Any:
    """So small that what is measured is the work around the model."""
    hidden = layers.Dense(16, "relu")
    return keras.Sequential([keras.Input((8,)), hidden, layers.Dense(10, "softmax")])


_MADE = (
    Case(_dense, keras.optimizers.Adam, random_numbers(1024), 16),
    Case(_convolutional, keras.optimizers.Adam, random_numbers(32, 32, 3), 8),
    Case(_transformer, keras.optimizers.AdamW, random_ids(1000, 64, (64,), 1000), 4),
    Case(_embedding(200_000, 32), keras.optimizers.SGD, random_ids(200_000, 32, (), 10), 64),
    Case(_embedding(1_000_000, 64), keras.optimizers.SGD, random_ids(1_000_000, 32, (), 10), 32),
    Case(_tiny, keras.optimizers.Adam, random_numbers(8), 8),
    *TRAINED,
)
CASES = dict(zip(NAMES, _MADE, strict=True))
