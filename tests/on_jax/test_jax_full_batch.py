"""On JAX, any step and any loss is exact with `microbatch_size`: calls of layers are split."""

import keras
import numpy as np
import pytest
from case import MSE
from helpers import LIMIT, dense_data, dense_model
from keras import layers, ops
from training import difference_of_fits

from ga_model import accumulate


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
            compiled = step._pure.lower(*step._inputs(((x, y),))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    split = bytes_of(microbatch_size=16, loss_over="batch")
    assert split < 0.35 * bytes_of(microbatch_size=512, loss_over="batch")


class Elsewhere(layers.Layer):
    """Writes to a variable that is no layer's."""

    other = None

    def call(self, x):
        type(self).other.assign(ops.mean(x))
        return x


def test_a_call_that_writes_elsewhere_runs_whole_or_as_in_plain_keras():
    Elsewhere.other = keras.Variable(0.0)

    def make():
        return keras.Sequential([dense_model(), Elsewhere()])

    split = {"rows": 12, "size": 5, "loss_over": "batch"}
    with pytest.warns(UserWarning, match="writes to a variable of another layer"):
        assert difference_of_fits(make, MSE, dense_data(12), **split) <= LIMIT
    # Plain Keras loses what it writes, and so does a window.
    assert difference_of_fits(make, MSE, dense_data(12), rows=4, steps=3) <= LIMIT
