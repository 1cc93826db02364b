"""`check_equivalence` on PyTorch: its verdicts, its reasons, and that it leaves all as it was."""

import random
import sys

import keras
import numpy as np
import pytest
from helpers import dense_data, seeded
from keras import layers, ops
from torch_step import torch

from ga_model import accumulate, check_equivalence

SPLIT, WINDOWS = {"microbatch_size": 4}, {"accumulation_steps": 3}

BY_MICROBATCH = {"microbatch_size": 4, "loss_over": "microbatch"}


class Centers(layers.Layer):
    def call(self, x):
        return x - 0.5 * ops.mean(x, axis=0, keepdims=True)


class Own(keras.Sequential):
    """Takes the root of a mean."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ops.sqrt(ops.mean(ops.square(self(x, training=True) - y)))
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss}


def in_batch(y_true, y_pred):
    return ops.mean(ops.logsumexp(ops.matmul(y_pred, ops.transpose(y_true)), axis=-1))


def with_layer(*parts, kind=keras.Sequential):
    def make(loss="mse", optimizer="adam"):
        first = layers.Dense(6, activation="tanh")
        model = seeded(lambda: kind([keras.Input((4,)), first, *parts, layers.Dense(2)]))
        model.compile(optimizer, loss, metrics=["mae"])
        return model

    return make


def check(make, settings, **arguments):
    x, y = dense_data(48)
    return check_equivalence(make(**arguments), x, y, batch_size=12, **settings)


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["own", "loss", "centers"])
def test_what_needs_the_full_batch_is_equivalent_where_it_has_it(kind):
    make = {"own": with_layer(kind=Own), "centers": with_layer(Centers())}.get(kind, with_layer())
    loss = {"loss": in_batch, "own": None}.get(kind, "mse")
    report = check(make, SPLIT, loss=loss, optimizer=keras.optimizers.SGD(0.05))
    assert report.verdict == "equivalent"


REASONS = {
    "normalization": (
        lambda: with_layer(layers.BatchNormalization())(),
        SPLIT,
        "BatchNormalization layers in training mode",
    ),
    "samples": (
        lambda: with_layer(Centers())(),
        BY_MICROBATCH,
        "whose outputs for one sample depend on the others",
    ),
    "loss": (
        lambda: with_layer()(in_batch, keras.optimizers.SGD(0.05)),
        WINDOWS,
        "whose gradients of a microbatch are not those of its halves together",
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", REASONS)
def test_what_differs_is_named(name):
    make, settings, words = REASONS[name]
    report = check(make, settings)
    assert report.verdict == "different"
    assert words in " ".join(report.reasons)
    assert words in " ".join(str(report).split())


def test_a_weight_that_is_wrong_is_found():
    class Ruled(Own):
        def microbatch_weight(self, x, y=None, sample_weight=None):
            return 1.0 if float(x[0, 0]) > 0 else 3.0

        def train_step(self, data):
            return keras.Sequential.train_step(self, data)

    report = check(with_layer(kind=Ruled), SPLIT)
    assert report.verdict == "different"
    assert "must return what the loss is divided by" in " ".join(report.reasons)


@pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")
def test_dropout_is_shared_and_everything_is_left_as_it_was():
    make = with_layer(layers.BatchNormalization(), layers.Dropout(0.4, seed=1))
    model = make()
    accumulate(model, accumulation_steps=2)
    model.fit(*dense_data(24), batch_size=6, verbose=0)

    def state():
        variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        return [np.array(ops.convert_to_numpy(v)) for v in variables]

    before, attributes = state(), dict(vars(model))
    numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    report = check_equivalence(model, *dense_data(48), batch_size=12, microbatch_size=4)
    assert report.random_layers.shared == [model.layers[2].name]
    for one, other in zip(state(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert random.getstate() == numbers[0]
    assert np.random.get_state()[1].tolist() == numbers[1]
    assert torch.equal(torch.get_rng_state(), numbers[2])
    assert vars(model).keys() == attributes.keys()
    assert (model.accumulation_steps, model.microbatch_size) == (2, None)
    assert "call" not in vars(model.layers[2])


def test_no_tensorflow_is_imported():
    assert "tensorflow" not in sys.modules
