"""Numbers that code computes from a number of samples that every batch has: exact, or told of.

References are plain Keras on the full batch.
"""

import itertools
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, assert_changed, relative_difference, seeded
from keras import ops

from ga_model import AccumulatingModel, accumulate

FOLLOWS = "is a constant of the graph, and so is that of a microbatch"
LITERAL = "which goes with the 8 samples of a microbatch, but does not follow from them"


@tf.function
def nested(e, n):
    return tf.reduce_sum(e) * (1 / n)


@tf.function
def nested_mean(e, n):
    return tf.reduce_sum(e) / n


NUMBERS = itertools.count()

# Of errors of shape (samples, 3), and inputs.
EXACT = {
    "number of samples": lambda e, x: ops.sum(e) / x.shape[0],
    "number of entries": lambda e, x: ops.sum(e) / (x.shape[0] * 3),
    "nested": lambda e, x: nested_mean(e, x.shape[0]),
    "of a graph": lambda e, x: ops.sum(e) * (1 / tf.cast(tf.shape(x)[0], e.dtype)),
    "shapes": lambda e, x: ops.mean(ops.reshape(e, (x.shape[0], -1)) + ops.zeros((x.shape[0], 1))),
    "literals": lambda e, x: 0.5 * ops.mean(e) + ops.mean(e**2) / 24 - 8.0,
    "sum by a literal": lambda e, x: ops.sum(e) / 7,
    "another each time": lambda e, x: ops.mean(e) + next(NUMBERS),
}
TOLD = {
    "inverse": lambda e, x: ops.sum(e) * (1 / x.shape[0]),
    "nested inverse": lambda e, x: nested(e, x.shape[0]),
    "degrees of freedom": lambda e, x: ops.sum(e) / (x.shape[0] - 1),
    "root": lambda e, x: ops.sum(e) / np.sqrt(x.shape[0]),
    "scaled mean": lambda e, x: ops.mean(e) * x.shape[0],
    "inside": lambda e, x: ops.mean(ops.log(e + x.shape[0])),
    "weight": lambda e, x: ops.sum(e) * (0.3 / x.shape[0]),
}


class OwnStep(keras.Model):
    """A model whose step has a loss of errors and inputs."""

    def __init__(self, loss_of):
        super().__init__()
        self.net = keras.layers.Dense(3)
        self.loss_of = loss_of

    def call(self, x):
        return self.net(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of((self(x, training=True) - y) ** 2, x)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Scales(keras.layers.Layer):
    """A layer whose outputs depend on how many samples there are."""

    def call(self, x):
        return x * (0.1 * x.shape[0])


def data():
    generator = np.random.default_rng(0)
    return generator.normal(size=(24, 4)), generator.normal(size=(24, 3))


def fit(make, steps, settings=None, loss=None, **compile_args):
    model = seeded(make)
    if settings is not None:
        model = accumulate(model, **settings)
    model.compile(keras.optimizers.SGD(0.01), loss, **compile_args)
    model(data()[0][:1])
    start = model.get_weights()
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(24 // steps, drop_remainder=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(batches, epochs=2, verbose=0, shuffle=False)
    return start, model.get_weights(), [str(warning.message) for warning in caught]


WINDOW, SPLIT = {"accumulation_steps": 3}, {"microbatch_size": 8, "loss_over": "microbatch"}


def difference(make, settings=WINDOW, **kwargs):
    steps = settings.get("accumulation_steps", 1)
    start, weights, said = fit(make, steps, settings, **kwargs)
    _, expected, _ = fit(make, 1, **kwargs)
    assert_changed(expected, start)
    return relative_difference(weights, expected, start), said


@pytest.mark.parametrize("settings", [WINDOW, SPLIT], ids=["window", "split"])
@pytest.mark.parametrize("name", EXACT)
def test_numbers_of_samples_that_are_read_are_exact(name, settings, float64):
    found, said = difference(lambda: OwnStep(EXACT[name]), settings)
    assert found < TOLERANCE[float64]
    assert said == []


@pytest.mark.parametrize("settings", [WINDOW, SPLIT], ids=["window", "split"])
@pytest.mark.parametrize("name", TOLD)
def test_numbers_that_follow_from_that_of_samples_are_told(name, settings, float64):
    found, said = difference(lambda: OwnStep(TOLD[name]), settings)
    assert found > 1e-3
    assert len(said) == 1
    assert FOLLOWS in said[0]
    assert re.search(rf"{__file__}:\d+", said[0])


def test_a_literal_that_is_their_number_is_told(float64):
    found, said = difference(lambda: OwnStep(lambda e, x: ops.sum(e) / 8))
    assert found > 1e-3
    assert [LITERAL in text for text in said] == [True]


@pytest.mark.parametrize("way", ["XLA", "steps_per_execution"])
def test_they_are_told_however_a_step_runs(way, float64):
    ways = {"XLA": {"jit_compile": True}, "steps_per_execution": {"steps_per_execution": 3}}
    _, said = difference(lambda: OwnStep(TOLD["inverse"]), **ways[way])
    assert [FOLLOWS in text for text in said] == [True]


def summed(y, outputs):
    return ops.sum((outputs - y) ** 2) * (1 / y.shape[0])


class Computes(keras.Model):
    """A model with a `compute_loss` of its own."""

    def __init__(self):
        super().__init__()
        self.net = keras.layers.Dense(3)

    def call(self, x):
        return self.net(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return summed(y, y_pred)


class Scaled(Computes):
    """A model with a layer whose outputs depend on how many samples there are."""

    def __init__(self):
        super().__init__()
        self.scales = Scales()

    def call(self, x):
        return self.scales(self.net(x))

    compute_loss = keras.Model.compute_loss


class HasRule(AccumulatingModel, OwnStep):
    """A step of one's own, with its weight."""

    def microbatch_weight(self, x, y, sample_weight):
        return ops.shape(y)[0]


@pytest.mark.parametrize("place", ["loss", "compute_loss", "layer"])
@pytest.mark.parametrize("settings", [WINDOW, SPLIT], ids=["window", "split"])
def test_they_are_told_wherever_they_are(place, settings, float64):
    ways = {"loss": (plain, summed), "compute_loss": (Computes, None), "layer": (Scaled, "mse")}
    make, loss = ways[place]
    found, said = difference(make, settings, loss=loss)
    assert found > 1e-3
    assert [FOLLOWS in text for text in said] == [True]


def plain():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


@pytest.mark.parametrize("make", [Scaled, lambda: OwnStep(TOLD["inverse"])])
def test_a_split_batch_is_exact(make, float64):
    """A layer that takes no other number of samples gets them all, which is told of."""
    found, said = difference(make, {"microbatch_size": 8}, loss="mse")
    assert found < TOLERANCE[float64]
    assert all("takes the memory of the full batch" in text for text in said)
    assert len(said) == (make is Scaled)


@pytest.mark.parametrize("loss", ["mse", keras.losses.Huber(reduction="sum")])
def test_losses_of_keras_are_exact(loss, float64):
    found, said = difference(plain, loss=loss)
    assert found < TOLERANCE[float64]
    assert said == []


def test_a_rule_of_ones_own_has_the_last_word(float64):
    found, said = difference(lambda: HasRule(TOLD["inverse"]))
    assert found < TOLERANCE[float64]
    assert said == []
