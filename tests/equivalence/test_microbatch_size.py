"""What a batch that is split may hold on TensorFlow, and what memory is left of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, seeded
from training import assert_close_logs

from ga_model import accumulate
from ga_model.bench import _measure
from ga_model.bench._cases import CASES
from ga_model.tools._process import in_own_process


class TakesAnything(keras.Model):
    """Sums up what its inputs have in every row."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def build(self, shape=None):
        self.dense.build((None, 4))

    def call(self, inputs):
        total = 0.0
        for value in tf.nest.flatten(inputs):
            if isinstance(value, tf.RaggedTensor):
                value = tf.reduce_sum(value, axis=1)
            elif isinstance(value, tf.SparseTensor):
                value = tf.sparse.to_dense(value)
            total = total + tf.cast(value, self.compute_dtype)
        return self.dense(total)


def rows_of(rows, features=4):
    return np.random.default_rng(8).normal(size=(rows, features)).astype(keras.config.floatx())


def ragged(rows):
    lengths = np.arange(rows) % 4
    return tf.RaggedTensor.from_row_lengths(rows_of(lengths.sum()), lengths)


def sparse(rows):
    dense = rows_of(rows)
    return tf.sparse.from_dense(np.where(dense > 0, dense, 0))


def assert_trained_alike(make, data, window, ways, is_static, optimizer=keras.optimizers.SGD):
    """Train by each size of microbatches and number of steps, of which the first are plain."""
    dataset, trained = tf.data.Dataset.from_tensor_slices(data), []
    for size, steps in ways:
        model = seeded(make)
        model.build((None, 4))
        accumulate(model, microbatch_size=size, accumulation_steps=steps)
        model.compile(optimizer(0.01), "mse", metrics=["mae"])
        start = model.get_weights()
        batches = dataset.batch(window // steps, drop_remainder=is_static)
        model.fit(batches, epochs=2, shuffle=False, verbose=0)
        trained.append(model)
    for model in trained[1:]:
        assert_close_logs(model.history.history, trained[0].history.history)
        assert_close(model, trained[0], start)


@pytest.mark.gate
@pytest.mark.parametrize(("weighted", "static"), [(False, False), (True, True)])
def test_whatever_a_batch_holds_is_split_and_accumulated(weighted, static, float64):
    rows = 24 if static else 31
    integers = np.arange(4 * rows).reshape(rows, 4) % 5
    inputs = {"a": ragged(rows), "b": (sparse(rows), {"c": rows_of(rows)}), "d": integers}
    data = (inputs, rows_of(rows, 2), *((rows_of(rows, 1) ** 2,) if weighted else ()))
    ways = (None, 1), (5, 1), (4, 1), (2, 3)
    assert_trained_alike(TakesAnything, data, 12, ways, static, keras.optimizers.Adam)


def wide_and_deep():
    """A sum that Keras takes for that of a bias if it knows of 8 samples."""
    inputs = keras.Input((4,))
    both = keras.layers.Dense(8)(inputs), keras.layers.Dense(1)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()(both)))


class NeedsNumber(keras.Model):
    """A model that cannot be traced for any number of samples."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(5), keras.layers.Dense(1)

    def build(self, shape):
        self.first.build((None, 4))
        self.last.build((None, 5))

    def call(self, inputs):
        return self.last(tf.reshape(self.first(inputs), (int(inputs.shape[0]), 5)))


@pytest.mark.parametrize("make", [wide_and_deep, NeedsNumber])
def test_batches_of_a_known_size_are_traced_for_any_if_they_can_be(make, float64):
    data, ways = (rows_of(64), rows_of(64, 1)), ((None, 1), (8, 1), (5, 1), (None, 4))
    assert_trained_alike(make, data, 32, ways, is_static=True)


def test_two_ragged_samples_show_too_little_to_be_tried():
    model = accumulate(seeded(TakesAnything), accumulation_steps=2)
    model.build()
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="Ragged and sparse samples are not altered. Received: 2"):
        model.train_on_batch(ragged(4)[1:3], rows_of(2, 2))


@pytest.mark.sweep
@pytest.mark.xfail(
    reason="a sum is added in a new buffer, and variables keep the sums: 1.2 sizes of the weights"
)
def test_a_gradient_is_freed_as_soon_as_it_is_added():
    """Peak memory of a model whose weights take nearly all of it, in processes of their own."""
    plain, split = (
        in_own_process(way, _measure.measure_memory, _measure.Setup("dense", False, way, number))
        for way, number in ((_measure.SMALL, 1), (_measure.SIZE, 16))
    )
    size = 4 * CASES["dense"].make_model().count_params()
    # The sums take one size of the weights, and some of that is free before they are there.
    assert split < plain + 0.85 * size
