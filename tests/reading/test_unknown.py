"""What readers of graphs fail on counts as not known: training goes on, exact or told."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_changed, relative_difference, seeded
from keras import layers

from ga_model import AccumulatingModel, GradientAccumulator

SAMPLES, STEPS = 16, 4
WINDOW = {"accumulation_steps": STEPS}
SPLIT = {"microbatch_size": SAMPLES // STEPS}
BATCH = {**SPLIT, "loss_over": "batch"}

pytestmark = pytest.mark.every_case


class OfKeras(AccumulatingModel, keras.Model):
    """A model with a loss that a layer adds."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(6, "tanh", activity_regularizer="l2")
        self.last = layers.Dense(2)

    def call(self, x):
        return self.last(self.first(x))


class OwnStep(OfKeras):
    """The same with a step of its own that logs a number, and scales gradients."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True))) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        scaled = [0.5 * gradient for gradient in gradients]
        self.optimizer.apply(scaled, self.trainable_variables)
        return {"loss": loss, "target": tf.reduce_mean(y)}


def fit(kind, **settings):
    """Return weights before and after, and what was said."""
    model = seeded(kind)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * SAMPLES, 4)).astype("float32")
    y = rng.normal(size=(2 * SAMPLES, 2)).astype("float32")
    model(x[:1])
    model.compile(keras.optimizers.SGD(0.1), "mse", **settings)
    start = model.get_weights()
    size = SAMPLES // settings.get("accumulation_steps", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
    return start, model.get_weights(), [str(warning.message) for warning in caught]


expected_of = functools.cache(fit)


def fail(monkeypatch, rule, error):
    """Let a function of the package, where a module looks it up, raise an error."""

    def failing(*args, **kwargs):
        raise error("an operation has changed")

    monkeypatch.setattr(f"ga_model.{rule}", failing)


@pytest.mark.parametrize(
    ("rule", "kind", "settings"),
    [
        ("reading._reading.keeps_samples", OfKeras, SPLIT),
        ("reading._reading.keeps_samples", OwnStep, WINDOW),
        ("reading._reading.bodies", OwnStep, WINDOW),
        ("reading._reading.bodies", OwnStep, BATCH),
        ("reading._reduced.axes_of", OwnStep, WINDOW),
        ("reading._step_loss.is_product", OwnStep, WINDOW),
        ("reading._loss_reading.dependence_of", OfKeras, SPLIT),
        ("reading._loss_reading.normalizing_names", OfKeras, SPLIT),
        ("reading._heard_gradients.normalizing_names", OwnStep, WINDOW),
        ("reading._heard_gradients.walk_back", OwnStep, WINDOW),
        ("reading._heard_gradients.numbers_in", OwnStep, WINDOW),
        ("reading._heard_gradients.work_by", OwnStep, WINDOW),
        ("reading._writes.written_handles", OfKeras, SPLIT),
        ("reading._writes.written_handles", OwnStep, WINDOW),
        ("reading._writes.walk_back", OwnStep, WINDOW),
        ("recording._custom_gradients.not_additive", OwnStep, WINDOW),
        ("recording._losses.check_adds_up", OfKeras, SPLIT),
        ("batch._passes.unlike", OwnStep, WINDOW),
        ("calls._calls.Arguments", OwnStep, BATCH),
    ],
)
def test_where_a_reader_fails_training_is_exact_and_a_window_is_told(
    rule, kind, settings, monkeypatch
):
    _, expected, _ = expected_of(kind)
    fail(monkeypatch, rule, (KeyError, ValueError, AttributeError)[len(rule) % 3])
    start, weights, said = fit(kind, **settings)
    assert_changed(weights, start)
    assert relative_difference(weights, expected, start) < 1e-5
    is_told = any("cannot be read" in text or "may combine" in text for text in said)
    assert is_told == (settings == WINDOW)


def test_it_is_told_where_ids_cannot_be_read(monkeypatch):
    fail(monkeypatch, "sums._places.dependence_of", KeyError)
    table = keras.Variable(np.zeros((6, 2), "float32"))
    accumulator = GradientAccumulator()

    @tf.function
    def add(ids, values):
        slices = tf.IndexedSlices(values, ids, tf.constant([6, 2], tf.int64))
        accumulator.add([slices], [table], weight=1.0)

    with pytest.warns(UserWarning, match="in a graph that cannot be read"):
        add(tf.constant([1, 3], tf.int64), tf.ones((2, 2)))
    np.testing.assert_array_equal(accumulator.mean()[0].values, np.ones((2, 2)))
