"""Layers that treat samples one by one, as a trial of their call is to find on each backend."""

import keras
from helpers import Applies, sequential
from keras import layers, ops

from ga_model import accumulate
from ga_model.core.layer_calls import LayerCall

ROWS = 6
SPLIT = None, []


def tried(layer, *inputs, known=None):
    """Return why a call in training is not split, or None, and the kinds of the losses it adds.

    Args:
        known: samples of a batch, for the trial.
    """
    backend = accumulate(keras.Sequential())._accumulation.backend
    training = {"training": True} if layer._call_has_training_arg else {}
    call = LayerCall(backend, layer, layer.call, inputs, training, 2, lambda array: known)
    return call.analyze(True), call.kinds


class Own(Applies):
    def build(self, shape):
        self.weight = self.add_weight(shape=(4,), initializer="zeros")
        self.state = self.add_weight(shape=(4,), initializer="ones", trainable=False)

    def call(self, x, training=None):
        return self.function(self, x)


def own(function):
    layer = Own(function)
    layer.build((None, 4))
    return layer


def adding(*losses):
    """Return a layer that adds losses that are functions of its input."""

    def function(layer, x):
        for loss in losses:
            layer.add_loss(loss(x * layer.weight))
        return x

    return own(function)


def frozen():
    parts = [layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(13)]
    model = sequential((8, 8, 3), *parts, layers.Flatten(), layers.Dense(4))
    model.trainable = False
    return sequential((8, 8, 3), model, layers.Dense(2))


def attention():
    inputs = keras.Input((7, 8))
    heads = layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs, use_causal_mask=True)
    return keras.Model(inputs, layers.LayerNormalization()(inputs + heads))


ALONE = {
    "dense": lambda: sequential((5,), layers.Dense(4, "gelu"), layers.Dropout(0.3)),
    "attention": attention,
    "images": lambda: sequential(
        (8, 8, 4),
        layers.Conv2D(4, 3, padding="same"),
        layers.MaxPooling2D(),
        layers.GroupNormalization(2),
        layers.DepthwiseConv2D(3),
        layers.Conv2DTranspose(3, 3, strides=2),
        layers.UpSampling2D(interpolation="bilinear"),
        layers.GlobalAveragePooling2D(),
    ),
    "recurrent": lambda: sequential(
        (7, 5),
        layers.Masking(),
        layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
        layers.GRU(3, reset_after=False, dropout=0.1),
    ),
    "noise": lambda: sequential((7, 5), layers.GaussianNoise(0.1), layers.SpatialDropout1D(0.1)),
    "statistics": lambda: sequential((5,), layers.Dense(4), layers.BatchNormalization()),
    "bfloat16": lambda: sequential((5,), layers.Dense(9, dtype="mixed_bfloat16")),
    "frozen": frozen,
    "spectral": lambda: sequential((5,), layers.SpectralNormalization(layers.Dense(3))),
}

# Losses, and what they are over samples.
LOSSES = {
    "mean": (lambda x: ops.mean(ops.square(x)), "mean"),
    "mean of sums": (lambda x: 0.5 * ops.mean(ops.sum(x, axis=-1)), "mean"),
    "sum": (lambda x: -3.0 * ops.sum(ops.abs(x)), "sum"),
    "sum over a number": (lambda x: ops.sum(x) / 10.0, "sum"),
    "sum over samples": (lambda x: ops.sum(x) / ops.cast(ops.shape(x)[0], "float32"), "mean"),
    "sum of means": (lambda x: ops.mean(x) - ops.mean(ops.square(x)), "mean"),
    "mean times samples": (lambda x: ops.mean(x) * x.shape[0], "sum"),
    "an offset": (lambda x: ops.mean(x) + 1.0, "mean"),
    "root": (lambda x: ops.sqrt(ops.mean(x)), None),
    "mean and sum": (lambda x: ops.mean(x) + ops.sum(x), None),
}

# Functions, and whether they give one value per sample that follows from it alone.
FUNCTIONS = {
    "each sample": (lambda x: ops.logsumexp(x, axis=-1), True),
    "over a stack": (lambda x: ops.logsumexp(ops.stack([x, 2.0 * x]), axis=0), True),
    "against others": (lambda x: ops.matmul(x, ops.transpose(x)), False),
    "padded": (lambda x: ops.pad(x, [[1, 0], [0, 0]]), False),
    "shifted": (lambda x: ops.roll(x, 1, axis=0), False),
    "places": (lambda x: x * ops.arange(x.shape[0], dtype="float32")[:, None], False),
    "of one": (lambda x: x - x[:1], False),
    "sorted": (lambda x: ops.sort(x, axis=0), False),
    "sorted alone": (lambda x: ops.sort(x, axis=1), True),
    "divided by samples": (lambda x: x / x.shape[0], False),
    "flat": (lambda x: ops.reshape(x, (-1, 2)), False),
    "flat and back": (lambda x: ops.reshape(ops.reshape(x, (-1, 2)), (-1, 4)), True),
    "joined": (lambda x: ops.reshape(ops.transpose(x), (-1, 4)), False),
    "loop": (
        lambda x: ops.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * v), (0, x))[1],
        True,
    ),
    "long loop": (
        lambda x: ops.while_loop(lambda v: ops.sum(v) < 90, lambda v: (v * 2,), (x,))[0],
        False,
    ),
    "unused": (lambda x: (ops.mean(x), ops.tanh(x))[1], True),
    "running sum": (lambda x: ops.cumsum(x, axis=0), False),
    "scattered": (lambda x: ops.scatter_update(x, [[0]], 2 * x[:1]), False),
    "gathered": (lambda x: ops.take_along_axis(x, ops.argsort(x, axis=-1), axis=-1), True),
    "not finite": (lambda x: ops.log(-x * x), False),
    "saturated": (lambda x: ops.tanh(x - 0.5 * ops.mean(ops.relu(-x), axis=0)), False),
}
