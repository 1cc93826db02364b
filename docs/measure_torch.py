"""Measure on PyTorch what accumulation costs in memory and time: `python docs/measure_torch.py`.

Each way trains in a process of its own for its memory: the peak while it trains, less what was
there before. Freed memory goes back to the system at once, so that what is measured is what is in
use. For the time all ways train in one process, epoch by epoch in turns; the fastest counts.
"""

import json
import os
import subprocess
import sys
import time

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
    """Return a model, of many weights or of many activations, and the shape of a sample."""
    from keras import Input, Sequential, layers

    if name in ("deep", "wide"):  # 21 million weights, of which the largest variable has 5 or 80 %
        units, number = (1024, 20) if name == "deep" else (4096, 2)
        hidden = [layers.Dense(units, activation="relu") for _ in range(number)]
        return Sequential([Input((1024,)), *hidden, layers.Dense(10)]), (1024,)
    convolutions = [layers.Conv2D(32, 3, activation="relu", padding="same") for _ in range(4)]
    pooled = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
    return Sequential([Input((32, 32, 3)), *convolutions, *pooled]), (32, 32, 3)


class PeakMemory:
    """The peak of this process's memory since it was made, in bytes."""

    def __init__(self):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak is what is there now
        self.before = self.read("VmRSS")

    def read(self, name):
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith(name))
        return int(line.split()[1]) * 1024

    def value(self):
        return self.read("VmHWM") - self.before


def prepare(name, batch_size, own=None, **settings):
    """Return a function that trains one epoch, and its samples."""
    import keras
    import numpy as np
    import torch

    from ga_model import accumulate

    torch.set_num_threads(1)
    keras.utils.set_random_seed(0)
    model, shape = make(name)
    if settings:
        model = accumulate(model, **settings)
    model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=own), "mse")
    x = np.random.default_rng(0).normal(size=(ROWS, *shape)).astype("float32")
    y = np.zeros((ROWS, 10), "float32")
    return lambda: model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)


def measure_memory(name, way):
    """Return the peak in MB."""
    train = prepare(name, **WAYS[way])
    peak = PeakMemory()
    for _ in range(3):
        train()
    return peak.value() / 1e6


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


def in_process(*arguments):
    command = [sys.executable, __file__, *arguments]
    options = {"KERAS_BACKEND": "torch", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    environment = {**os.environ, **options}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(output.stdout.splitlines()[-1])


def main():
    for name in MODELS:
        print(f"\n{name}\n\n| | peak memory | time per sample |\n|---|---|---|")
        times = in_process(name)
        for way in WAYS:
            print(f"| {way} | {in_process(name, way):.0f} MB | {times[way]:.0f} us |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif len(sys.argv) == 2:
        print(json.dumps(measure_times(sys.argv[1])))
    else:
        print(json.dumps(measure_memory(*sys.argv[1:])))
