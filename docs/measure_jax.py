"""Measure what accumulation costs on the JAX backend of Keras.

    python docs/measure_jax.py

prints a table of times per sample over those of plain Keras with batches of 32: the median of
rounds in which all methods take turns. It runs on the CPU.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import statistics
import time

import keras
import numpy as np
from keras import layers

from ga_model import accumulate

ROWS, BATCHES, ROUNDS = 32, 64, 7
WAYS = {  # settings, batches of 32 per batch, and what Keras's own optimizer accumulates
    "plain Keras": ({}, 1, None),
    "Keras's `gradient_accumulation_steps=4`": ({}, 1, 4),
    "`accumulation_steps=4`": ({"accumulation_steps": 4}, 1, None),
    "`microbatch_size=32`": ({"microbatch_size": ROWS}, 4, None),
    '`microbatch_size=32`, `loss_over="batch"`': (
        {"microbatch_size": ROWS, "loss_over": "batch"},
        4,
        None,
    ),
}


def dense():
    hidden = [layers.Dense(1024, "relu") for _ in range(4)]
    return keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(10)])


def convolutional():
    parts = [layers.Conv2D(16 * n, 3, n, activation="relu") for n in (1, 2)]
    return keras.Sequential([keras.Input((32, 32, 3)), *parts, layers.Flatten(), layers.Dense(10)])


def tiny():
    return keras.Sequential([keras.Input((16,)), layers.Dense(16, "relu"), layers.Dense(10)])


def prepare(make, settings, number, own):
    """Return a function that trains one epoch and returns the seconds it took."""
    keras.utils.set_random_seed(0)
    model = accumulate(make(), **settings) if settings else make()
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=own), "mse")
    generator = np.random.default_rng(0)
    x = generator.random((ROWS * BATCHES, *model.input_shape[1:]), "float32")
    y = generator.random((ROWS * BATCHES, 10), "float32")

    def train():
        started = time.perf_counter()
        model.fit(x, y, batch_size=ROWS * number, shuffle=False, verbose=0)
        return time.perf_counter() - started

    return train


def ratios(make):
    """Return the ratio to plain Keras of each way."""
    ways = {way: prepare(make, *arguments) for way, arguments in WAYS.items()}
    for train in ways.values():  # which traces and compiles
        train()
    rounds = [{way: train() for way, train in ways.items()} for _ in range(ROUNDS)]
    plain = "plain Keras"
    return {way: statistics.median(r[way] / r[plain] for r in rounds) for way in ways}


def main():
    measured = [ratios(make) for make in (dense, convolutional, tiny)]
    print("| | dense (4 layers of 1024) | convolutional | tiny |\n|---|---|---|---|")
    for way in WAYS:
        print(f"| {way} | " + " | ".join(f"{found[way]:.2f}" for found in measured) + " |")


if __name__ == "__main__":
    main()
