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
from models import Centers
from training import difference_of_fits

from ga_model import accumulate

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


class CountsInside(Centers):
    """Is not split, so calls in it are."""

    def __init__(self):
        super().__init__()
        self.counts = layers.SpectralNormalization(layers.Dense(4))

    def call(self, x):
        return super().call(self.counts(x, training=True))


def test_a_call_that_writes_to_variables_runs_whole():
    def make():
        return keras.Sequential([keras.Input((4,)), CountsInside(), dense_model()])

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


class Named(keras.Model):
    """Compares samples, so calls in it are split, of which one gives what is no array."""

    def __init__(self):
        super().__init__()
        self.first, self.last = NamedDense(3), layers.Dense(2)

    def call(self, x):
        outputs, name = self.first(x)
        assert name == "first"
        return self.last(outputs - ops.mean(outputs, axis=0))


class NamedDense(layers.Dense):
    def call(self, x):
        return super().call(x), "first"


@pytest.mark.filterwarnings("ignore:.*cannot be split:UserWarning")
def test_a_call_that_cannot_be_traced_alone_runs_whole():
    assert difference_of_fits(Named, sgd("mse"), dense_data(24), **SIZE) <= LIMIT
