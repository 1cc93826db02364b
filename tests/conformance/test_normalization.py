"""Running averages of BatchNormalization are those of the full batch, on any backend.

Where the inputs of a layer do not depend on what another one has normalized, they equal those of
plain Keras on the full batch.
"""

import keras
import numpy as np
import pytest
from averages import SETTINGS, averages, difference, first, fit
from helpers import (
    LIMIT,
    dense_data,
    relative_difference,
    seeded,
)
from keras import layers, ops
from own_train_steps import OwnStep

from ga_model import accumulate

pytestmark = pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")


every_setting = pytest.mark.parametrize("settings", SETTINGS)


def masked():
    inputs = keras.Input((5, 3))
    normal = layers.BatchNormalization(momentum=0.8)(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(normal)))


def masked_data():
    x, y = dense_data(31, 15)
    x = x.reshape(-1, 5, 3)
    x[np.arange(31) % 3 == 0, 2:] = 0
    x[np.arange(31) % 7 == 0, 1:] = 0
    return x, y


def of_images():
    inputs = keras.Input((4, 3, 2))
    parts = [layers.BatchNormalization(axis=a, momentum=0.8)(inputs) for a in (1, -1, 2)]
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layers.Concatenate()(parts))))


def image_data():
    x, y = dense_data(31, 24)
    return 2 * x.reshape(-1, 4, 3, 2) + 1, y


@every_setting
def test_they_are_those_of_the_full_batch(settings):
    assert difference(first, settings) <= LIMIT


@pytest.mark.parametrize("settings", ["both", "split", "full batch"])
@pytest.mark.parametrize("case", [(masked, masked_data), (of_images, image_data)])
def test_of_other_layers_and_data(case, settings):
    make, data = case
    assert difference(make, settings, data()) <= LIMIT


@pytest.mark.parametrize("settings", ["windows", "split", "full batch"])
def test_the_warning_says_what_is_true(settings):
    with pytest.warns(
        UserWarning, match="Their running averages are updated once per update"
    ) as caught:
        fit(first, *SETTINGS[settings])
    assert [w.category for w in caught].count(UserWarning) == 1


def test_nothing_moves_before_the_update_or_in_an_interrupted_window():
    model = accumulate(seeded(first), accumulation_steps=3, microbatch_size=3)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = dense_data(16)
    model.train_on_batch(x[:4], y[:4])
    start = averages(model)
    model.train_on_batch(x[4:8], y[4:8])
    for one, other in zip(averages(model), start, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="same number"):
        model.train_on_batch(x[:4], y[:3])
    model.close_window()
    for one, other in zip(averages(model), start, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_left_out_moves_nothing():
    x, y = dense_data(12)
    bad = y.copy()
    bad[5:10] = np.nan
    settings = {"microbatch_size": 5, "skip_nonfinite": True}
    with pytest.warns(UserWarning, match="were skipped"):
        found, start = fit(first, settings, 12, (x, bad), epochs=1)
    rest = [np.concatenate([part[:5], part[10:]]) for part in (x, y)]
    expected, _ = fit(first, {}, 12, rest, epochs=1)
    assert relative_difference(found, expected, start) <= LIMIT


class Twice(OwnStep):
    """Calls its first layer on two things."""

    def make(self):
        self.normal, self.head = layers.BatchNormalization(momentum=0.8), layers.Dense(2)
        self.normal.build((None, 4)), self.head.build((None, 4))

    def call(self, x):
        return self.head(self.normal(x))

    def loss_of(self, x, y):
        first, second = (self.normal(x, training=True) for x in (x, 0.5 * x + 1))
        return ops.sqrt(ops.mean(ops.square(self.head(first + second) - y)))


def test_a_layer_that_a_step_calls_twice_moves_twice():
    assert difference(Twice, "split") <= LIMIT


class MovesItself(layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask)


@pytest.mark.filterwarnings("ignore:A window of microbatches:UserWarning")
def test_a_layer_that_moves_itself_is_told_of_and_gets_the_full_batch_where_it_can():
    def own():
        return keras.Sequential([keras.Input((4,)), MovesItself(name="bn"), layers.Dense(2)])

    with pytest.warns(UserWarning, match="cannot be split into microbatches"):
        assert difference(own, "split") <= LIMIT
    with pytest.warns(UserWarning, match=r"\['bn'\].*once per microbatch"):
        assert difference(own, "windows") > 1e-2
