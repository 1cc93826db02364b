"""Windows with sparse gradients are updated by XLA, which compiles for each number of rows."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
)
from training import difference_of_fits
from zoo import embedding, embedding_data

from ga_model.replicas import _optimizers
from ga_model.sums._one_gradient import padded


def test_few_numbers_of_rows_are_compiled_for():
    generator, padded_to = np.random.default_rng(0), {}
    pad = tf.function(padded)
    for count in [*range(140), 1000, 1024, 1025]:
        ids = generator.integers(1, 9, count)
        slices = tf.IndexedSlices(
            tf.constant(generator.normal(size=(count, 2))), tf.constant(ids), tf.constant([9, 2])
        )
        more = pad(slices)
        padded_to[count] = int(more.indices.shape[0])
        assert more.values.shape == (padded_to[count], 2)
        assert count <= padded_to[count] <= max(1.25 * count, count + 1)
        assert set(more.indices.numpy()) == set(ids)  # nothing that was not looked up
        np.testing.assert_array_equal(tf.convert_to_tensor(more), tf.convert_to_tensor(slices))
    sizes = {size for count, size in padded_to.items() if 64 < count <= 128}
    assert sizes == {80, 96, 112, 128}
    assert padded_to[1024] == 1024
    assert padded_to[0] == 0


class OwnSGD(keras.optimizers.SGD):
    """Might take rows of zeros for something."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize(
    ("optimizer", "is_known"),
    [
        (lambda: keras.optimizers.Adam(0.1), True),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), True),
        (lambda: OwnSGD(0.1), False),
        (lambda: keras.optimizers.LossScaleOptimizer(OwnSGD(0.1)), False),
    ],
)
@pytest.mark.every_case
def test_an_optimizer_of_the_users_own_is_given_no_rows_of_zeros(optimizer, is_known):
    assert _optimizers.is_of_keras(optimizer()) == is_known


@pytest.mark.one_device("XLA compiles no update of several replicas")
def test_an_update_with_rows_is_compiled(monkeypatch, float64):
    given = []

    def compiled(function):
        def noted(share):
            given.extend(type(gradient).__name__ for gradient in share.gradients)
            return function(share)

        return tf.function(noted, autograph=False, jit_compile=True)

    monkeypatch.setattr(_optimizers, "compiled", compiled)
    difference = difference_of_fits(
        functools.partial(embedding, 200),
        lambda: {"optimizer": keras.optimizers.Adagrad(0.1), "loss": "mse", "jit_compile": True},
        embedding_data(55),
        rows=4,
        steps=3,
    )
    assert "IndexedSlices" in given
    assert difference <= TOLERANCE[float64]
