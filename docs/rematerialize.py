"""What `keras.RematScope` and microbatches save together: `python docs/rematerialize.py`.

A convolutional network trains on two batches of 128 images, each way in a process of its own.
Printed is what training adds to the peak of the process's memory, on Linux.
"""

import contextlib
import os
import subprocess
import sys

WAYS = {"plain Keras": "0 0", "remat": "1 0", "microbatch_size=16": "0 16", "both": "1 16"}


def measure(rematerialize, microbatch_size):
    import keras
    import numpy as np
    import tensorflow as tf

    from ga_model import accumulate
    from ga_model.tools._memory import peak_memory

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            layer = keras.layers.Conv2D
            self.parts = [layer(16, 3, padding="same", activation="gelu") for _ in range(4)]

        def call(self, inputs):
            for part in self.parts:
                inputs = part(inputs)
            return inputs

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    with keras.RematScope("full") if rematerialize else contextlib.nullcontext():
        blocks = [Block(), Block()]
    head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((64, 64, 3)), *blocks, *head])
    accumulate(model, microbatch_size=microbatch_size or None)
    model.compile("adam", "mse")
    generator = np.random.default_rng(0)
    x, y = (generator.random(shape, "float32") for shape in ((128, 64, 64, 3), (128, 1)))
    before = peak_memory()
    for _ in range(2):
        model.train_on_batch(x, y)
    return (peak_memory() - before) / 1e6


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(f"{measure(*map(int, sys.argv[1:])):.0f} MB")
    else:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # Freed arrays go back to the system.
        for name, arguments in WAYS.items():
            command = [sys.executable, __file__, *arguments.split()]
            run = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            print(f"{name:20} {run.stdout.strip()}")
