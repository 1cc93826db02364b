"""Measure what trying a `train_step` of one's own takes: `python docs/measure_proof.py`.

A step is tried in the first batch, once per `compile`. So the first epoch, of eight batches of 32
samples, is timed in plain Keras, and with a window of eight batches whose step is tried, or not
(`verify=False`). Each is trained in processes of its own, in turns; the median counts.

The models are a small convolutional network, and transformers: a small one, and one of 11 million
values for sequences of 64 positions, which computes for as long as a model that needs accumulation.
"""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import multiprocessing
import statistics
import time
import warnings

import keras
import numpy as np
from keras import Input, Model, layers

from ga_model import accumulate

MODELS = ["convolutional", "small transformer", "transformer"]
WAYS = ["plain Keras", "not tried", "tried"]
REPEATS = 3


def make(name):
    if name == "convolutional":
        inputs = x = Input((32, 32, 3))
        for filters in (16, 32, 64):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
            x = layers.MaxPooling2D()(layers.GroupNormalization(8)(x))
        return Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    width, depth = (64, 4) if name == "small transformer" else (384, 6)
    inputs = x = Input((64, width))
    for _ in range(depth):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(normalized, normalized)
        hidden = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(hidden)
    return Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def first_epoch(name, way):
    """Return the seconds of a first epoch."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = make(name)

        def call(self, x, training=None):
            return self.net(x, training=training)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
            return keras.ops.mean(losses)

    model = Own()
    x = np.random.default_rng(0).random((256, *model.net.input_shape[1:]), "float32")
    model(x[:1])
    if way != "plain Keras":
        model = accumulate(model, accumulation_steps=8, verify=way == "tried")
    model.compile("adam")
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nothing is tried
        model.fit(x, np.arange(256) % 10, batch_size=32, verbose=0)
    return time.perf_counter() - begin


def main():
    for name in MODELS:
        seconds = {way: [] for way in WAYS}
        for _ in range(REPEATS):
            for way in WAYS:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    seconds[way].append(pool.apply(first_epoch, (name, way)))
        medians = {way: statistics.median(found) for way, found in seconds.items()}
        shown = (f"{way} {found:.2f} s" for way, found in medians.items())
        ratio = medians["tried"] / medians["plain Keras"]
        print(f"{name}: {', '.join(shown)}; tried over plain {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
