"""Measure what reading a `train_step` of one's own takes: `python docs/measure_reading.py`.

A step is read when its graph is made, and nothing is read per batch. So the first epoch, of four
batches, is timed with a rule for the weights of microbatches, with which no loss is read, and
without one. Each is trained in processes of its own, in turns; the median counts.
"""

import os
import statistics
import subprocess
import sys
import time

MODELS = ["convolutional", "transformer"]
WAYS = ["not read", "read"]
REPEATS = 5


def make(name):
    from keras import Input, Model, layers

    if name == "convolutional":
        inputs = x = Input((32, 32, 3))
        for filters in (16, 32, 64):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
            x = layers.MaxPooling2D()(layers.GroupNormalization(8)(x))
        return Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    inputs = x = Input((64, 64))
    for _ in range(4):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16)(normalized, normalized)
        x = x + layers.Dense(64)(layers.Dense(128, "gelu")(layers.LayerNormalization()(x)))
    return Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def first_epoch(name, way):
    """Return the seconds of a first epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    from ga_model import accumulate

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = make(name)

        def call(self, x, training=None):
            return self.net(x, training=training)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(
                    y, self(x, training=True), from_logits=True
                )
                loss = tf.reduce_mean(losses)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    if way == "not read":
        Own.microbatch_weight = lambda self, x, y=None, sample_weight=None: tf.shape(y)[0]
    model = Own()
    x = np.random.default_rng(0).random((32, *model.net.input_shape[1:]), "float32")
    model(x[:1])
    model = accumulate(model, accumulation_steps=4)
    model.compile("adam", jit_compile=False)
    batches = tf.data.Dataset.from_tensor_slices((x, np.arange(32) % 10)).batch(8)
    begin = time.perf_counter()
    model.fit(batches, verbose=0)
    return time.perf_counter() - begin


def main():
    if len(sys.argv) > 1:
        print(first_epoch(*sys.argv[1:]))
        return
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for name in MODELS:
        seconds = {way: [] for way in WAYS}
        for _ in range(REPEATS):
            for way in WAYS:
                command = [sys.executable, __file__, name, way]
                output = subprocess.check_output(command, env=environment, text=True)
                seconds[way].append(float(output.split()[-1]))
        medians = [statistics.median(seconds[way]) for way in WAYS]
        print(f"{name}: {medians[0]:.2f} s, read {medians[1]:.2f} s, {medians[1] / medians[0]:.2f}")


if __name__ == "__main__":
    main()
