"""Batches of one or two samples, of a known number: many lengths are then that of samples."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, assert_changed, relative_difference, seeded
from keras import layers
from test_step_loss import EXACT, OwnStep, fit

from ga_model import accumulate


def with_dropout():
    hidden = [layers.Dense(6, "tanh"), layers.Dropout(0.5), layers.GaussianNoise(0.1)]
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2)])


@pytest.mark.every_case
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["two views", "views in the same shape", "views on an axis"])
def test_views_are_followed_for_small_batches(name, rows, float64):
    step = functools.partial(OwnStep, EXACT[name])
    start, weights, said = fit(step, 24 // rows, is_static=True)
    _, expected, _ = fit(step, 1, is_static=True)
    assert not said
    assert relative_difference(weights, expected, start) < TOLERANCE[float64]


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [{"accumulation_steps": 2}, {"microbatch_size": 1}], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_random_numbers_are_drawn_for_small_batches(rows, settings):
    model = accumulate(seeded(with_dropout), **settings)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    start = model.get_weights()
    samples = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((samples[:, :4], samples[:, 4:]))
    model.fit(batches.batch(rows, drop_remainder=True), epochs=2, shuffle=False, verbose=0)
    assert_changed(model.get_weights(), start)
