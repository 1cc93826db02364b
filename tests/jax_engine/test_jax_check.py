"""`check_equivalence` on JAX: its verdicts, its reasons, and that it leaves all as it was."""

import random

import keras
import numpy as np
import pytest
from helpers import dense_data, seeded
from keras import layers, ops

from ga_model import AccumulatingModel, accumulate, check_equivalence

SPLIT, WINDOWS = {"microbatch_size": 4}, {"accumulation_steps": 3}

BY_MICROBATCH = {"microbatch_size": 4, "loss_over": "microbatch"}


class Centers(layers.Layer):
    def call(self, x):
        return x - 0.5 * ops.mean(x, axis=0, keepdims=True)


class Own(keras.Sequential):
    """Takes the root of a mean."""

    def compute_loss_and_updates(self, *args, **kwargs):
        loss, aux = super().compute_loss_and_updates(*args, **kwargs)
        return ops.sqrt(loss), aux


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
    loss = {"loss": in_batch}.get(kind, "mse")
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
        "only if the model treats samples",
    ),
    "loss": (
        lambda: with_layer()(in_batch, keras.optimizers.SGD(0.05)),
        WINDOWS,
        "only if the loss is a mean or",
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


class Ruled(AccumulatingModel, keras.Sequential):
    def microbatch_weight(self, x, y=None, sample_weight=None):
        return ops.where(x[0, 0] > 0, 1.0, 3.0)


def test_a_weight_that_is_wrong_is_found():
    report = check(with_layer(kind=Ruled), SPLIT)
    assert report.verdict == "different"
    assert "have the weights 0.333" in " ".join(report.reasons)


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
    numbers = random.getstate(), np.random.get_state()[1].tolist()
    report = check_equivalence(model, *dense_data(48), batch_size=12, microbatch_size=4)
    assert report.random_layers.shared == [model.layers[2].name]
    for one, other in zip(state(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert random.getstate() == numbers[0]
    assert np.random.get_state()[1].tolist() == numbers[1]
    assert vars(model).keys() == attributes.keys()
    assert (model.accumulation_steps, model.microbatch_size) == (2, None)
    assert "call" not in vars(model.layers[2])
