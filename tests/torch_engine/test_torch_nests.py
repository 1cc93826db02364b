"""On PyTorch, calls get and give dicts as they are, whose keys are in no order of the alphabet."""

import keras
import numpy as np
from helpers import relative_difference, seeded
from keras import layers, ops
from pairs import TOLERANCE

from ga_model import accumulate


class Named(keras.layers.Layer):
    """Takes and gives dicts, of which it goes by the order."""

    def __init__(self):
        super().__init__()
        self.one, self.other = layers.Dense(4), layers.Dense(4)

    def call(self, inputs):
        first, second = inputs.values()
        return {"z": self.one(first), "m": self.other(second), "again": (second, second)}


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.named = Named()

    def call(self, x):
        return self.named({"b": x[:, :3], "a": x[:, 3:]})

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        assert list(y_pred) == ["z", "m", "again"]
        first, second, (one, same) = y_pred.values()
        assert one is same
        return ops.mean(ops.square(first - y)) + 3.0 * ops.mean(ops.abs(second * one[:, :1] - y))


def trained(**settings):
    model = seeded(Net)
    x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
    model(x[:2])
    if settings:
        accumulate(model, **settings)
    model.compile(keras.optimizers.SGD(0.1))
    start = model.get_weights()
    model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0, shuffle=False)
    return start, model.get_weights()


def test_dicts_keep_their_order():
    start, expected = trained()
    _, weights = trained(microbatch_size=4)
    assert relative_difference(weights, expected, start) <= TOLERANCE
