"""Measure what `microbatch_size` costs. Run it by hand: `python tests/bench_microbatch_size.py`.

Batches of 256 rows by 16 are compared with plain Keras on batches of 16 rows, and on whole batches.
All read the rows from the same pipeline, which holds batches of 256 rows. Peak memory is that of a
process of its own, less its peak before `fit`: the median of `RUNS`. Times are those of both ways
in turns in one process, after two turns that trace: the median ratio.
"""

import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
RUNS = 3
REPEATS = 11
BATCH, ROWS = 256, 16
WAYS = ("plain, 16 rows", "256 rows by 16", "plain, 256 rows")


def make(way, jit_compile, kind):
    """Return a compiled model and its batches."""
    import keras
    import tensorflow as tf

    from ga_model import accumulate

    layers = keras.layers
    keras.utils.set_random_seed(0)
    if kind == "convolution":  # nearly all memory is activations
        shape = (64, 64, 3)
        hidden = [layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(12)]
        network = [*hidden, layers.GlobalAveragePooling2D()]
    else:
        shape = (512,)
        network = [layers.Dense(1024, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input(shape), *network, layers.Dense(10)])
    if way == "256 rows by 16":
        accumulate(model, microbatch_size=ROWS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=jit_compile)
    x = tf.random.stateless_uniform((2 * BATCH, *shape), seed=(1, 2))
    y = tf.random.stateless_uniform((2 * BATCH,), (1, 2), maxval=10, dtype=tf.int32)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    return model, batches.rebatch(ROWS) if way == "plain, 16 rows" else batches


def measure_memory(way, jit_compile):
    """Print what training adds to this process's peak, in MB."""
    from ga_model._demo import peak_memory

    model, batches = make(way, jit_compile, "convolution")
    before = peak_memory()
    model.fit(batches, epochs=2, shuffle=False, verbose=0)
    print((peak_memory() - before) / 2**20)


def memory(way, jit_compile):
    command = [sys.executable, __file__, way, str(int(jit_compile))]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return float(run.stdout.split()[-1])


def times(kind, jit_compile):
    """Return seconds for 256 rows of each way, `REPEATS` of each."""
    pairs = {way: make(way, jit_compile, kind) for way in WAYS[:2]}
    seconds = {way: [] for way in pairs}
    for repeat in range(REPEATS + 2):
        for way, (model, batches) in pairs.items():
            data = list(batches.unbatch().batch(ROWS if way == WAYS[0] else BATCH).take(16))
            data = data[: BATCH // data[0][0].shape[0]]
            started = time.perf_counter()
            for x, y in data:
                model.train_on_batch(x, y)  # `fit` waits now and then, for a second or two
            if repeat > 1:
                seconds[way].append(time.perf_counter() - started)
    return seconds


def main():
    for jit_compile in (False, True):
        median = {w: statistics.median(memory(w, jit_compile) for _ in range(RUNS)) for w in WAYS}
        for way, value in median.items():
            ratio = value / median[WAYS[0]]
            print(
                f"memory  convolution  jit {jit_compile!s:5}  {way:16} {value:6.0f} MB {ratio:6.2f}"
            )
    for kind in ("convolution", "dense"):
        for jit_compile in (False, True):
            plain, split = times(kind, jit_compile).values()
            ratios = sorted(b / a for a, b in zip(plain, split, strict=True))
            print(
                f"time    {kind:11}  jit {jit_compile!s:5}  256 rows by 16 over plain, 16 rows "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    if sys.argv[1:]:
        measure_memory(sys.argv[1], bool(int(sys.argv[2])))
    else:
        main()
