"""Thousands of windows: nothing grows, nothing is traced again, nothing drifts."""

import gc

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from helpers import assert_close, in_the_sweep, seeded, sequential

from ga_model import AccumulationScheduler, accumulate

pytestmark = pytest.mark.gate


def steps_of(number):
    """Return how many batches each of so many windows has."""
    tenths = np.array([1, 2, 3, 3, 1])
    return np.repeat([1, 3, 2, 4, 1], tenths * number // 10).tolist()


def batches(number):
    """Yield (x, y) of 1 to 8 rows with 1 to 5 positions each, row by row of a cycle of 97."""
    generator = np.random.default_rng(0)
    shapes = generator.integers([1, 1], [9, 6], size=(97, 2))
    pool = [(generator.normal(size=(*s, 3)), generator.normal(size=(*s, 2))) for s in shapes]
    for i in range(sum(steps_of(number))):
        yield pool[i % len(pool)]


def windows(number):
    """Yield the same rows, those of a window at a time."""
    remaining = batches(number)
    for steps in steps_of(number):
        window = [next(remaining) for _ in range(steps)]
        yield tuple(np.concatenate([flat(part[i]) for part in window]) for i in range(2))


def flat(values):
    """Put positions in the place of rows: their mean is the same."""
    return values.reshape(-1, 1, values.shape[-1])


def dataset(make, number, size):
    specs = [tf.TensorSpec((None, None, size), tf.float64) for size in (3, 2)]
    data = tf.data.Dataset.from_generator(lambda: make(number), output_signature=tuple(specs))
    return data.apply(tf.data.experimental.assert_cardinality(size))


def make():
    return sequential((None, 3), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2))


@pytest.mark.parametrize("number", [2_000, in_the_sweep(10_000)])
def test_windows_of_changing_sizes_and_shapes(number, float64):
    traced, memory = [], []

    class Counted(keras.Sequential):
        def train_step(self, data):
            traced.append(data)
            return super().train_step(data)

    def note_memory(batch, logs):
        if batch % 500 == 0:
            gc.collect()
            memory.append(psutil.Process().memory_info().rss)

    def compiled(model):
        rate = keras.optimizers.schedules.CosineDecay(0.01, number, alpha=0.1)
        model.compile(keras.optimizers.Adam(rate), "mse")
        return model

    reference = compiled(seeded(make))
    model = seeded(lambda: Counted([keras.Input((None, 3)), *make().layers]))
    model = compiled(accumulate(model))
    model.optimizer.build(model.trainable_variables)
    start = model.get_weights()
    notes = keras.callbacks.LambdaCallback(on_train_batch_end=note_memory)
    steps = steps_of(number)
    callbacks = [AccumulationScheduler(lambda update: steps[update], by="update"), notes]
    data = dataset(batches, number, sum(steps))
    model.fit(data, callbacks=callbacks, shuffle=False, verbose=0)
    reference.fit(dataset(windows, number, number), shuffle=False, verbose=0)
    assert model.optimizer.iterations == reference.optimizer.iterations == number
    assert len(traced) <= 10  # of a trial, and one for each way to run and length
    quarter = len(memory) // 4
    growth = max(memory[quarter:]) - memory[quarter]
    assert growth < 100 * number  # 0.07 MB was measured; a scalar tensor per window is more
    assert_close(model, reference, start)
