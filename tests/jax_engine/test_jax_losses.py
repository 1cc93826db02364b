"""On JAX, losses of every reduction weigh microbatches as the full batch does."""

import keras
import numpy as np
import pytest
from helpers import dense_data, dense_model
from keras import layers, ops
from pairs import TOLERANCE, difference_of_fits, difference_of_orders, train

WAYS = {
    "both": {"rows": 4, "steps": 3, "size": 3},
    "steps": {"rows": 4, "steps": 3},
    "size": {"rows": 12, "size": 5},
}


def sgd(loss, learning_rate=0.05, **kwargs):
    return lambda: {"optimizer": keras.optimizers.SGD(learning_rate), "loss": loss, **kwargs}


def assert_matches(make, arguments, data, way, tolerance=TOLERANCE):
    order = difference_of_orders(make, arguments, data, rows=12)
    found = difference_of_fits(make, arguments, data, **WAYS[way])
    assert found <= max(tolerance, 10 * order), (found, order)


class AddsRoot(layers.Layer):
    def call(self, x):
        self.add_loss(ops.sqrt(ops.sum(ops.square(x))))
        return x


def test_what_a_layer_adds_that_is_neither_is_exact_or_told():
    def make():
        return keras.Sequential([dense_model(), AddsRoot()])

    with pytest.warns(UserWarning, match="neither a mean nor a sum"):
        assert_matches(make, sgd("mse"), dense_data(31), "size")
    with pytest.warns(UserWarning, match="added with `add_loss`"):
        train(make, sgd("mse"), dense_data(12), rows=4, accumulation_steps=3)


def contrastive(y_true, y_pred):
    similarities = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.mean(ops.logsumexp(similarities, axis=-1))


def per_sample(y_true, y_pred):
    """Compares samples where a target is negative."""
    values = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return values + ops.cast(ops.any(y_true < 0), values.dtype) * ops.mean(values)


def test_values_of_samples_that_may_be_compared_match():
    x, y = dense_data(48)
    y = np.abs(y)
    y[30] *= -1
    settings = {"rows": 24, "size": 8}
    assert difference_of_fits(dense_model, sgd(per_sample), (x, y), **settings) <= TOLERANCE


def test_losses_that_do_not_add_up_are_told_of_where_they_are_asked_for():
    settings = {"microbatch_size": 5, "loss_over": "microbatch"}
    with pytest.warns(UserWarning, match="a mean or a sum over samples"):
        train(dense_model, sgd(contrastive), dense_data(12), rows=12, **settings)
    with pytest.warns(UserWarning, match="a mean or a sum over samples"):
        train(dense_model, sgd(contrastive), dense_data(12), rows=4, accumulation_steps=3)


def test_a_divisor_that_is_alike_by_chance_matches():
    x, y = dense_data(48)
    y = np.abs(y)
    y[40:] *= np.sign(np.arange(8) % 3 - 0.5)[:, None]
    settings = {"rows": 24, "size": 8}
    assert difference_of_fits(dense_model, sgd(over_a_plain_mask), (x, y), **settings) <= TOLERANCE


def over_a_plain_mask(y_true, y_pred):
    mask = ops.cast(y_true[:, :1] > 0, y_pred.dtype)
    return ops.sum(mask * ops.square(y_true - y_pred)) * ops.reciprocal(ops.sum(mask))


class Centers(layers.Layer):
    def call(self, x):
        return x - 0.5 * ops.mean(x, axis=0, keepdims=True)


def test_a_model_that_mixes_samples_is_exact_or_told():
    def make():
        return keras.Sequential([dense_model(), Centers(), layers.Dense(2)])

    for size in (4, 1):
        with pytest.warns(UserWarning, match="cannot be split into microbatches"):
            found = difference_of_fits(make, sgd("mse"), dense_data(12), rows=12, size=size)
        assert found <= TOLERANCE
    with pytest.warns(UserWarning, match="only if the model treats"):
        train(make, sgd("mse"), dense_data(12), rows=4, accumulation_steps=3)


class Looks(layers.Embedding):
    """Takes from vectors of ids a part of their mean over samples."""

    def call(self, ids):
        vectors = super().call(ids)
        return vectors - 0.5 * ops.mean(vectors, axis=0, keepdims=True)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["ids", "values"])
def test_a_model_that_mixes_samples_is_found_though_the_first_are_alike(kind, own):
    class Own(keras.Sequential):
        def train_step(self, state, data):
            return keras.Sequential.train_step(self, state, data)

    def make():
        first = Looks(7, 3) if kind == "ids" else Centers()
        shape = keras.Input((2,), dtype="int32" if kind == "ids" else "float32")
        parts = [first, layers.Flatten(), layers.Dense(3, activation="tanh"), layers.Dense(2)]
        return (Own if own else keras.Sequential)([shape, *parts])

    generator = np.random.default_rng(0)
    ids = generator.integers(0, 7, size=(24, 2), dtype="int32")  # of int64 plain Keras warns
    x = ids if kind == "ids" else generator.normal(size=(24, 2))
    x[:5] = x[0]
    y = generator.normal(size=(24, 2))
    with pytest.warns(UserWarning, match="cannot be split into microbatches"):
        found = difference_of_fits(make, sgd("mse"), (x, y), rows=12, size=5)
    assert found <= TOLERANCE
