"""On PyTorch, losses whose class has a `__call__` of its own."""

import keras
import numpy as np
import pytest
import zoo
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
    relative_difference,
    told,
)
from keras import layers, ops
from training import difference_of_fits, train

WAYS = {
    "steps": {"rows": 4, "accumulation_steps": 3},
    "size": {"rows": 12, "microbatch_size": 5},
    "both": {"rows": 4, "accumulation_steps": 3, "microbatch_size": 3},
}
every_way = pytest.mark.parametrize("way", WAYS)


class Root(keras.losses.MeanSquaredError):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sqrt(super().__call__(y_true, y_pred, sample_weight))


class Penalized(keras.losses.MeanSquaredError):
    """Adds a sum to Keras's mean."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        number = super().__call__(y_true, y_pred, sample_weight)
        return number + 0.01 * ops.sum(ops.square(y_pred))


class Total(keras.losses.MeanSquaredError):
    """Does not come to Keras's `__call__`, which would be a mean."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return 0.01 * ops.sum(ops.square(y_true - y_pred))


class OfCounted(keras.losses.Loss):
    """A mean over the samples that a mask counts."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        counts = ops.cast(y_true[:, :1] > 0, "float32")
        return ops.sum(counts * ops.square(y_true - y_pred)) / (ops.sum(counts) + 1e-9)


class Weighted(keras.losses.Loss):
    """Reads the sample weights by itself."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        values = ops.mean(ops.square(y_true - y_pred), axis=-1)
        return ops.sum(values * sample_weight) / ops.sum(sample_weight)


class Scaled(keras.losses.MeanSquaredError):
    factor = 3.0

    def __call__(self, y_true, y_pred, sample_weight=None):
        return self.factor * super().__call__(y_true, y_pred, sample_weight)


def arguments(loss):
    return lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": loss}


def compare(make, loss, data, way, caught, fit_args=None):
    """Return the relative difference from plain Keras, and what was said."""
    reference, start = train(make, arguments(loss), data, rows=12, fit_args=fit_args)
    caught.clear()
    model, _ = train(make, arguments(loss), data, fit_args=fit_args, **WAYS[way])
    return relative_difference(model.get_weights(), reference.get_weights(), start), told(caught)


@pytest.mark.every_case
@every_way
@pytest.mark.parametrize("kind", [Root, Penalized])
def test_what_is_made_of_kerass_number_is_exact_or_told(kind, way, recwarn):
    difference, said = compare(dense_model, kind(), dense_data(24), way, recwarn)
    if "accumulation_steps" in WAYS[way]:
        assert ["does not train as the full batch" in text for text in said] == [True]
        assert difference > 1e-2
    else:
        assert (difference <= LIMIT, said) == (True, [])


@pytest.mark.every_case
@every_way
@pytest.mark.parametrize("kind", [Total, OfCounted])
def test_what_is_computed_without_keras_is_exact(kind, way):
    x, y = dense_data(24)
    y[::4] = np.abs(y[::4])  # of all windows, and all microbatches of three or more, some count
    y[::3] = np.abs(y[::3])
    settings = WAYS[way]
    found = difference_of_fits(
        dense_model,
        arguments(kind()),
        (x, y),
        rows=settings["rows"],
        steps=settings.get("accumulation_steps", 1),
        size=settings.get("microbatch_size"),
    )
    assert found <= LIMIT


@pytest.mark.every_case
@every_way
def test_sample_weights_are_tried_with_it(way, recwarn):
    weights = np.random.default_rng(0).uniform(0.1, 3.0, size=24).astype("float32")
    data = (*dense_data(24), weights)
    difference, said = compare(dense_model, Weighted(), data, way, recwarn)
    assert (difference <= LIMIT, said) == (True, [])


def masked():
    parts = [layers.Masking(), layers.SimpleRNN(4, return_sequences=True), layers.Dense(2)]
    return keras.Sequential([keras.Input((5, 3)), *parts])


@pytest.mark.every_case
@every_way
def test_kerass_number_times_another_is_exact_and_silent(way, recwarn):
    weights = np.random.default_rng(0).uniform(0.1, 3.0, size=(24, 5)).astype("float32")
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight", "sum"):
        loss = Scaled(reduction=reduction)
        loss.factor = 0.03 if reduction == "sum" else 3.0
        data = (*zoo.masked_data(24), weights)
        difference, said = compare(masked, loss, data, way, recwarn)
        assert (difference <= LIMIT, said) == (True, []), reduction


def test_the_number_may_change_between_epochs(recwarn):
    loss = Scaled()

    def anneal(epoch, logs):
        loss.factor = 0.5 * epoch

    fit_args = {"epochs": 3, "callbacks": [keras.callbacks.LambdaCallback(on_epoch_begin=anneal)]}
    for way in ("steps", "size"):
        loss.factor = 0.0
        data = dense_data(24)
        difference, said = compare(dense_model, loss, data, way, recwarn, fit_args)
        assert (difference <= LIMIT, said) == (True, [])


def test_what_it_does_with_a_mask_is_told_of(recwarn):
    difference, said = compare(masked, Penalized(), zoo.masked_data(24), "steps", recwarn)
    assert ["does not train as the full batch" in text for text in said] == [True]
    assert difference > 1e-2
