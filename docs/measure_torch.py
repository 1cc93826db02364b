"""Measure on PyTorch what accumulation costs in memory and time: `python docs/measure_torch.py`.

Each way trains in a process of its own. Peak memory is that of the process while it trains, less
what it had before; time is that of the last epoch.
"""

import json
import os
import subprocess
import sys

ROWS, SMALL = 256, 32
STEPS = ROWS // SMALL
WAYS = {
    "plain Keras, batches of 32": {"batch_size": SMALL},
    "plain Keras, batches of 256": {"batch_size": ROWS},
    "Keras's gradient_accumulation_steps=8": {"batch_size": SMALL, "own": STEPS},
    "accumulation_steps=8": {"batch_size": SMALL, "accumulation_steps": STEPS},
    "microbatch_size=32": {"batch_size": ROWS, "microbatch_size": SMALL},
}
MODELS = ["dense", "convolution"]


def make(name):
    """Return a model of many weights, or of many activations, and the shape of a sample."""
    from keras import Input, Sequential, layers

    if name == "dense":
        hidden = [layers.Dense(4096, activation="relu") for _ in range(2)]
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


def measure(name, batch_size, own=None, **settings):
    """Train, and return the peak in MB and microseconds per sample."""
    import time

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
    num = 2 * ROWS
    x = np.random.default_rng(0).normal(size=(num, *shape)).astype("float32")
    y = np.zeros((num, 10), "float32")
    peak = PeakMemory()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        times.append(time.perf_counter() - start)
    return {"megabytes": peak.value() / 1e6, "microseconds": 1e6 * min(times[1:]) / num}


def main():
    for name in MODELS:
        print(f"\n{name}\n\n| | peak memory | time per sample |\n|---|---|---|")
        for way, arguments in WAYS.items():
            command = [sys.executable, __file__, name, json.dumps(arguments)]
            environment = {**os.environ, "KERAS_BACKEND": "torch"}
            output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            found = json.loads(output.stdout.splitlines()[-1])
            cells = f"{found['megabytes']:.0f} MB | {found['microseconds']:.0f} us"
            print(f"| {way} | {cells} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], **json.loads(sys.argv[2]))))
    else:
        main()
