"""Measure on PyTorch what accumulation costs in memory and time: `python docs/measure_torch.py`.

Each way trains in a process of its own for its memory: the peak while it trains, less what was
there before. Freed memory goes back to the system at once, so that what is measured is what is in
use. For the time all ways train in one process, epoch by epoch in turns; the fastest counts.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import multiprocessing
import time

import keras
import numpy as np
import torch
from keras import layers

from ga_model import accumulate
from ga_model.tools._memory import give_back_freed_memory, peak_memory, reset_peak_memory

ROWS, SMALL = 256, 32
STEPS = ROWS // SMALL
WAYS = {
    "plain Keras, batches of 32": {"batch_size": SMALL},
    "plain Keras, batches of 256": {"batch_size": ROWS},
    "Keras's gradient_accumulation_steps=8": {"batch_size": SMALL, "own": STEPS},
    "accumulation_steps=8": {"batch_size": SMALL, "accumulation_steps": STEPS},
    "microbatch_size=32": {"batch_size": ROWS, "microbatch_size": SMALL},
    'the same, loss_over="batch"': {
        "batch_size": ROWS,
        "microbatch_size": SMALL,
        "loss_over": "batch",
    },
}
MODELS = ["deep", "wide", "convolution"]


def make(name):
    """Return a model, of many weights or of many activations."""
    if name in ("deep", "wide"):  # 21 million weights, of which the largest variable has 5 or 80 %
        units, number = (1024, 20) if name == "deep" else (4096, 2)
        hidden = [layers.Dense(units, activation="relu") for _ in range(number)]
        return keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(10)])
    convolutions = [layers.Conv2D(32, 3, activation="relu", padding="same") for _ in range(4)]
    pooled = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    return keras.Sequential([keras.Input((32, 32, 3)), *convolutions, *pooled])


def prepare(name, batch_size, own=None, **settings):
    """Return a function that trains one epoch."""
    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    model = make(name)
    if settings:
        model = accumulate(model, **settings)
    model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=own), "mse")
    x = np.random.default_rng(0).normal(size=(ROWS, *model.input_shape[1:])).astype("float32")
    y = np.zeros((ROWS, 10), "float32")
    return lambda: model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)


def measure_memory(name, way):
    """Return the peak in MB."""
    give_back_freed_memory()
    train = prepare(name, **WAYS[way])
    reset_peak_memory()
    before = peak_memory()
    for _ in range(3):
        train()
    return (peak_memory() - before) / 1e6


def measure_times(name, rounds=9):
    """Return microseconds per sample of each way."""
    trainings = {way: prepare(name, **arguments) for way, arguments in WAYS.items()}
    times = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, train in trainings.items():
            start = time.perf_counter()
            train()
            times[way].append(1e6 * (time.perf_counter() - start) / ROWS)
    return {way: min(found[1:]) for way, found in times.items()}


def in_process(function, *arguments):
    """Return what a function returns in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main():
    for name in MODELS:
        print(f"\n{name}\n\n| | peak memory | time per sample |\n|---|---|---|")
        times = in_process(measure_times, name)
        for way in WAYS:
            memory = in_process(measure_memory, name, way)
            print(f"| {way} | {memory:.0f} MB | {times[way]:.0f} us |", flush=True)


if __name__ == "__main__":
    main()
