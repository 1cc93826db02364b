"""Off TensorFlow, losses of every reduction weigh microbatches as the full batch does."""

import functools

import keras
import numpy as np
import pytest
import zoo
from helpers import dense_data, dense_model
from keras import layers, ops
from pairs import TOLERANCE, assert_same_logs, difference_of_fits, difference_of_orders, train

WAYS = {
    "both": {"rows": 4, "steps": 3, "size": 3},
    "steps": {"rows": 4, "steps": 3},
    "size": {"rows": 12, "size": 5},
}


every_way = pytest.mark.parametrize("way", WAYS)


def sgd(loss, learning_rate=0.05, **kwargs):
    return lambda: {"optimizer": keras.optimizers.SGD(learning_rate), "loss": loss, **kwargs}


def assert_matches(make, arguments, data, way, tolerance=TOLERANCE):
    order = difference_of_orders(make, arguments, data, rows=12)
    found = difference_of_fits(make, arguments, data, **WAYS[way])
    assert found <= max(tolerance, 10 * order), (found, order)


def sample_weights(*shape):
    return np.random.default_rng(0).uniform(0.1, 3.0, size=shape).astype("float32")


REDUCTIONS = ["mean_with_sample_weight", "sum_over_batch_size", "mean", "sum"]


@every_way
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["masked", "dense"])
def test_reductions_with_sample_weights_match(kind, reduction, way):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    if kind == "masked":
        data, make = (*zoo.masked_data(31), sample_weights(31, 5)), zoo.masked_recurrent
    else:
        data, make = (*dense_data(31), sample_weights(31)), dense_model
    assert_matches(make, sgd(loss, 0.01), data, way)


@every_way
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_masks_and_weight_regularizers_match(reduction, way):
    def make():
        regularizer = keras.regularizers.L2(0.05)
        recurrent = layers.SimpleRNN(4, return_sequences=True, kernel_regularizer=regularizer)
        return keras.Sequential([keras.Input((5, 3)), layers.Masking(), recurrent, layers.Dense(2)])

    loss = keras.losses.MeanSquaredError(reduction=reduction)
    assert_matches(make, sgd(loss, 0.01), zoo.masked_data(31), way)


def test_class_weights_match():
    x = dense_data(31)[0]
    labels = (np.arange(31) % 3).astype("int32")

    def make():
        return keras.Sequential([dense_model(outputs=3), layers.Softmax()])

    fit_args = {"class_weight": {0: 1.0, 1: 3.0, 2: 0.2}}
    for way in WAYS.values():
        arguments = sgd("sparse_categorical_crossentropy")
        found = difference_of_fits(make, arguments, (x, labels), fit_args=fit_args, **way)
        assert found <= TOLERANCE


def two_masks():
    inputs = [keras.Input((5, 3)), keras.Input((5, 3))]
    sequences = [
        layers.SimpleRNN(4, return_sequences=True)(layers.Masking()(part)) for part in inputs
    ]
    outputs = [layers.Dense(2, name=n)(part) for n, part in zip("ab", sequences)]
    return keras.Model(inputs, outputs)


def two_masks_data(rows):
    x, y = zoo.masked_data(rows)
    return [x, x[::-1].copy()], [y, y[::-1].copy()]


@pytest.mark.parametrize("reductions", [("mean", "mean"), ("sum", "mean"), ("mean", "sum")])
def test_two_outputs_have_denominators_of_their_own(reductions):
    losses = [keras.losses.MeanSquaredError(reduction=r) for r in reductions]
    arguments = sgd(losses, 0.01, loss_weights=[1.0, 0.3])
    assert_matches(two_masks, arguments, two_masks_data(31), "size")


def test_two_outputs_have_sample_weights_of_their_own():
    """Keras writes masks into them, on PyTorch, which is to happen once."""
    x, y = two_masks_data(31)
    data = x, y, [sample_weights(31, 5), 2.0 - sample_weights(31, 5) / 2.0]
    assert_matches(two_masks, sgd(["mse", "mse"], 0.01), data, "size")


def test_weighted_metrics_of_masked_outputs_do_not_depend_on_microbatches():
    data = *zoo.masked_data(31), sample_weights(31, 5)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    arguments = sgd(loss, 0.0001, weighted_metrics=["mse", "mae"])
    plain, _ = train(zoo.masked_recurrent, arguments, data, rows=12)
    model, _ = train(zoo.masked_recurrent, arguments, data, rows=12, microbatch_size=5)
    assert_same_logs(model, plain)


def test_unlike_masks_are_told_of_in_windows():
    arguments = sgd(["mse", "mse"])
    with pytest.warns(UserWarning, match="The terms of .* loss"):
        train(two_masks, arguments, two_masks_data(16), rows=4, accumulation_steps=2)


class Adds(layers.Layer):
    def call(self, x):
        self.add_loss(0.02 * ops.mean(ops.square(x)))
        self.add_loss(0.01 * ops.sum(ops.abs(x)))
        return x


def adding():
    first = layers.Dense(6, activation="tanh", kernel_regularizer="l2")
    return keras.Sequential([keras.Input((4,)), first, Adds(), layers.Dense(2)])


def test_means_and_sums_that_layers_add_are_told_apart():
    assert_matches(adding, sgd("mse"), dense_data(31), "size")


def vector(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def mean(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def total(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


@pytest.mark.parametrize("loss", [total, mean, vector])
@pytest.mark.parametrize("way", [*WAYS, "one"])
def test_losses_of_ones_own_match(loss, way):
    arguments = sgd(loss, 0.005)
    settings = {"one": {"rows": 12, "size": 1}, **WAYS}[way]
    assert difference_of_fits(dense_model, arguments, dense_data(31), **settings) <= TOLERANCE


def contrastive(y_true, y_pred):
    similarities = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.mean(ops.logsumexp(similarities, axis=-1))


def over_a_mask(y_true, y_pred):
    mask = ops.cast(y_true[:, :1] > 0, y_pred.dtype)
    return ops.sum(mask * ops.square(y_true - y_pred)) / (ops.sum(mask) + 1e-3)


@pytest.mark.parametrize("size", [5, 1])
@pytest.mark.parametrize("loss", [contrastive, over_a_mask, "dice"])
def test_losses_that_do_not_add_up_match(loss, size):
    x, y = dense_data(31)
    settings = {"rows": 12, "size": size}
    assert difference_of_fits(dense_model, sgd(loss), (x, np.abs(y)), **settings) <= TOLERANCE


@functools.wraps(keras.losses.mean_squared_error)
def wrapped(y_true, y_pred):
    return contrastive(y_true, y_pred)


OVER_SAMPLES = {
    "axis": lambda: keras.losses.CosineSimilarity(axis=0),
    "wrapped": lambda: wrapped,
}


@pytest.mark.parametrize("kind", OVER_SAMPLES)
def test_losses_that_look_like_those_of_keras_match(kind):
    x, y = dense_data(31)
    arguments = sgd(OVER_SAMPLES[kind](), 0.1)
    assert difference_of_fits(dense_model, arguments, (x, np.abs(y)), **WAYS["size"]) <= TOLERANCE


def test_a_loss_of_predictions_that_are_alike_at_first_matches():
    def make():
        parts = [layers.Dense(5), layers.Dense(2, kernel_initializer="zeros")]
        return keras.Sequential([keras.Input((4,)), *parts])

    x, y = dense_data(31)
    assert difference_of_fits(make, sgd(shifted), (x, y), **WAYS["size"]) <= TOLERANCE


def shifted(y_true, y_pred):
    return contrastive(y_true, y_pred + 0.3) + mean(y_true, y_pred)
