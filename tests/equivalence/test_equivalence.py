"""Gradients of tables: more rows than the table has, and rows in some batches only."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, assert_changed, dense_data, relative_difference, seeded
from training import difference_of_fits
from zoo import embedding, embedding_data

from ga_model import accumulate


@pytest.mark.parametrize("jit_compile", [False, True])
def test_more_rows_than_the_table_has_match_the_whole_batch(jit_compile, float64):
    """60 ids are looked up in a window, of 7."""
    difference = difference_of_fits(
        functools.partial(embedding, 7),
        lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "jit_compile": jit_compile},
        embedding_data(55),
        rows=4,
        steps=3,
    )
    assert difference <= TOLERANCE[float64]


class UsedInTwoWays(keras.Model):
    """A table of which full batches look up rows, and the ragged last one all of it."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(7, 3), initializer="uniform", name="table")
        self.dense = keras.layers.Dense(2)

    def call(self, ids):
        table = tf.convert_to_tensor(self.table)
        if ids.shape[0] == 4:
            return self.dense(tf.gather(table, ids))
        return self.dense(tf.one_hot(ids, 7, dtype=table.dtype) @ table)


@pytest.mark.one_device("replicas have other numbers of rows")
@pytest.mark.parametrize("first", [4, 2])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_gradient_that_is_sparse_in_some_batches_only(jit_compile, first, float64):
    ids = np.random.default_rng(0).integers(0, 7, size=30).astype("int32")
    y = dense_data(30)[1]
    trained = []
    for wrap in (True, False):
        model = seeded(UsedInTwoWays)
        model(ids[:1])
        if wrap:
            model = accumulate(model, accumulation_steps=3)
        model.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=jit_compile)
        start = model.get_weights()
        for begin in range(0, 30, 10):
            window = np.arange(begin, begin + 10)
            batches = np.split(window, [first, first + 4]) if wrap else [window]
            for rows in batches:
                model.train_on_batch(ids[rows], y[rows])
        trained.append(model.get_weights())
    assert_changed(trained[1], start)
    assert relative_difference(*trained, start) <= TOLERANCE[float64]
