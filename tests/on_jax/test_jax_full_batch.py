"""On JAX, any step and any loss is exact with `microbatch_size`: calls of layers are split."""

import keras
import numpy as np
import pytest
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
)
from keras import layers, ops
from own_train_steps import OwnStep
from training import difference_of_fits

from ga_model import AccumulatingModel, accumulate

SIZE = {"rows": 12, "size": 5}


def sgd(loss=None, **kwargs):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": loss, **kwargs}


def fresh(base):
    """Return a function that makes a small network of a class."""
    return lambda: base([keras.Input((4,)), *dense_model().layers])


def test_activations_are_not_kept():
    """Of a call that is split, JAX keeps what goes into it and comes out, and one microbatch."""

    def bytes_of(**settings):
        rows, width = 512, 64
        parts = [layers.Dense(width, "tanh") for _ in range(12)]
        model = accumulate(keras.Sequential([keras.Input((width,)), *parts, layers.Dense(1)]))
        model.compile("sgd", "mse", **settings)
        x, y = np.ones((rows, width), "float32"), np.ones((rows, 1), "float32")
        model.train_on_batch(x, y)
        backend = model._accumulation.backend
        with backend.outside_of_training():
            step = backend.compiled(("whole", settings["microbatch_size"]), None, [])
            compiled = step.lowered(((x, y),)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    split = bytes_of(microbatch_size=16, loss_over="batch")
    assert split < 0.35 * bytes_of(microbatch_size=512, loss_over="batch")


def test_dropout_draws_the_same_numbers_in_both_passes():
    """The gradient of a kernel behind a dropout is zero exactly where its inputs were dropped."""

    class Masked(AccumulatingModel, OwnStep):
        pass

    drop, dense = layers.Dropout(0.5, seed=1), layers.Dense(1, use_bias=False)
    model = Masked(lambda y, y_pred: ops.sum(y_pred), [keras.Input((64,)), drop, dense])
    model.compile(keras.optimizers.SGD(1.0), microbatch_size=1)
    dense.kernel.assign(np.zeros((64, 1)))
    logs = model.train_on_batch(np.eye(64, dtype="float32"), np.ones((64, 1)), return_dict=True)
    assert logs["own"] == 0.0
    change = -np.asarray(dense.kernel.value)[:, 0]
    assert set(np.unique(change)) == {0.0, 2.0}
    model.train_on_batch(np.eye(64, dtype="float32"), np.ones((64, 1)))
    assert np.any(-np.asarray(dense.kernel.value)[:, 0] - change != change)  # others next time


class Counts(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign(self.calls + 1)
        return x * ops.cast(self.calls > 0, x.dtype)


class Centers(layers.Layer):
    def call(self, x):
        return x - 0.5 * ops.mean(x, axis=0, keepdims=True)


class CountsInside(Centers):
    """Is not split, so calls in it are."""

    def __init__(self):
        super().__init__()
        self.counts = layers.SpectralNormalization(layers.Dense(4))

    def call(self, x):
        return super().call(self.counts(x, training=True))


@pytest.mark.every_case
@pytest.mark.parametrize("inner", [Counts, CountsInside])
def test_a_call_that_writes_to_variables_runs_whole(inner):
    def make():
        return keras.Sequential([keras.Input((4,)), inner(), Centers(), dense_model()])

    with pytest.warns(UserWarning, match="cannot be split into microbatches"):
        assert difference_of_fits(make, sgd("mse"), dense_data(24), **SIZE) <= LIMIT


class Elsewhere(layers.Layer):
    """Writes to a variable that is no layer's."""

    other = None

    def call(self, x):
        type(self).other.assign(ops.mean(x))
        return x


def test_a_call_that_writes_elsewhere_runs_whole_or_as_in_plain_keras():
    Elsewhere.other = keras.Variable(0.0)
    base = fresh(keras.Sequential)
    data = dense_data(12)

    def make():
        return keras.Sequential([base(), Elsewhere()])

    with pytest.warns(UserWarning, match="writes to a variable of another layer"):
        assert difference_of_fits(make, sgd("mse"), data, **SIZE, loss_over="batch") <= LIMIT
    # Plain Keras loses what it writes, and so does a window.
    assert difference_of_fits(make, sgd("mse"), data, rows=4, steps=3) <= LIMIT
