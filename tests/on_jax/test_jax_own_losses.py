"""Losses, metrics and layers of one's own beside what Keras adds: exact without a word."""

import warnings

import keras
import pytest
from helpers import LIMIT, dense_data, dense_model
from keras import layers, ops
from training import difference_and_said, difference_of_fits


def mean(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def marked(y_true, y_pred):
    mask = ops.cast(y_true > 0, "float32")
    return ops.sum(ops.abs(y_true - y_pred) * mask) / ops.maximum(ops.sum(mask), 1.0)


class AddsASum(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class Scales(layers.Layer):
    """By one random number for all samples."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x, training=None):
        return x * (1 + keras.random.uniform((), seed=self.seeds)) if training else x


def model_with(*parts, **options):
    def make():
        hidden = layers.Dense(3, activation="tanh", **options)
        return keras.Sequential([keras.Input((4,)), hidden, *(p() for p in parts), layers.Dense(2)])

    return make


CASES = {
    "an activity regularizer": (model_with(activity_regularizer="l2"), mean, None),
    "a weight regularizer": (model_with(kernel_regularizer="l1"), mean, None),
    "a masked metric": (dense_model, "mse", [marked]),
    "a loss that is a sum": (model_with(AddsASum), mean, None),
}
WINDOWS = [name for name in CASES if name != "a loss that is a sum"]  # which is told of there


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, {"rows": 12, "size": 5}) for name in CASES]
    + [(name, {"rows": 4, "steps": 3}) for name in WINDOWS],
)
def test_what_stands_beside_is_exact_without_a_word(name, settings):
    make, loss, metrics = CASES[name]

    def arguments():
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": loss, "metrics": metrics}

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert difference_of_fits(make, arguments, dense_data(24), **settings) <= LIMIT


def test_a_random_number_for_all_samples_is_told_of():
    difference, said = difference_and_said(model_with(Scales), {"accumulation_steps": 3}, rows=4)
    assert difference > LIMIT
    assert ["does not train as the full batch" in text for text in said] == [True]
