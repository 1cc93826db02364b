"""On PyTorch, losses of every reduction weigh microbatches as the full batch does."""

import keras
import pytest
from helpers import (
    LIMIT,
    dense_data,
)
from keras import layers, ops
from torch_step import Step
from training import difference_and_said, difference_of_fits

WAYS = {
    "both": {"rows": 4, "steps": 3, "size": 3},
    "steps": {"rows": 4, "steps": 3},
    "size": {"rows": 12, "size": 5},
}
UNLIKE = "A window of microbatches does not train as the full batch"


def sgd(loss, learning_rate=0.05, **kwargs):
    return lambda: {"optimizer": keras.optimizers.SGD(learning_rate), "loss": loss, **kwargs}


class Adds(layers.Layer):
    def call(self, x):
        self.add_loss(0.02 * ops.mean(ops.square(x)))
        self.add_loss(0.01 * ops.sum(ops.abs(x)))
        return x


def total(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


class Centers(layers.Layer):
    def call(self, x):
        return x - 0.5 * ops.mean(x, axis=0, keepdims=True)


class Scaled(layers.Layer):
    """Adds means over samples, times a number that is zero at first."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + self.scale * ops.mean(x, axis=0, keepdims=True)


class OwnMean(keras.Sequential):
    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ops.mean(ops.square(self(x, training=True) - y))
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_weights])
        return {"loss": loss.detach()}


HIDDEN = {
    "head": lambda: [Centers(), layers.Dense(2, kernel_initializer="zeros")],
    "scale": lambda: [Scaled(), layers.Dense(2)],
}


@pytest.mark.every_case
@pytest.mark.parametrize("base", [keras.Sequential, OwnMean])
@pytest.mark.parametrize("kind", HIDDEN)
def test_a_model_that_mixes_samples_behind_zero_weights_is_exact_or_told(kind, base):
    def make():
        return base([keras.Input((4,)), layers.Dense(5, activation="tanh"), *HIDDEN[kind]()])

    found, told = difference_and_said(make, {"microbatch_size": 5})
    assert found <= LIMIT
    assert told
    assert all("cannot be split" in text and "Training is exact" in text for text in told)
    found, told = difference_and_said(make, {"accumulation_steps": 3}, rows=4)
    assert found > 10 * LIMIT
    assert [text.partition(".")[0] for text in told] == [UNLIKE]


class Annealed(layers.Layer):
    """Adds a loss whose weight is zero in the first epoch."""

    def __init__(self, function):
        super().__init__(name="annealed")
        self.function = function

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.add_loss(self.factor * self.function(x))
        return x


class OwnLoss(Step):
    def forward_loss(self, x, y):
        return super().forward_loss(x, y) + sum(self.losses)


def annealed(function, base=keras.Sequential):
    def make():
        parts = [layers.Dense(6, activation="tanh"), Annealed(function), layers.Dense(2)]
        return base([keras.Input((4,)), *parts])

    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.get_layer("annealed").factor.assign(0.02 * epoch)

    return make, {"callbacks": [Anneal()]}


def squares(x):
    return ops.sum(ops.square(x))


@pytest.mark.every_case
@pytest.mark.parametrize("base", [keras.Sequential, OwnLoss])
def test_what_a_layer_adds_is_found_when_it_is_not_zero(base):
    make, fit_args = annealed(squares, base)
    found = difference_of_fits(
        make, sgd("mse"), dense_data(24), fit_args=fit_args, epochs=3, **WAYS["size"]
    )
    assert found <= LIMIT


def test_what_a_layer_adds_later_that_is_neither_is_exact_or_told():
    make, fit_args = annealed(lambda x: ops.sqrt(squares(x)))
    arguments = {"fit_args": fit_args, "epochs": 3}
    with pytest.warns(UserWarning, match="a loss that is neither a mean nor a sum over samples"):
        found = difference_of_fits(make, sgd("mse"), dense_data(24), rows=12, size=5, **arguments)
    assert found <= LIMIT
    with pytest.warns(UserWarning, match=UNLIKE):
        found = difference_of_fits(make, sgd("mse"), dense_data(24), rows=4, steps=3, **arguments)
    assert found > 10 * LIMIT
