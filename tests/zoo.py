"""The models of the equivalence tests, each with its data and its loss."""

import keras
import numpy as np
from helpers import MeanOfSquares, dense_data, dense_model, sequential
from keras import layers


class WithUnusedVariable(keras.Model):
    def __init__(self):
        super().__init__()
        self.used = layers.Dense(2, activation="tanh")
        self.unused = layers.Dense(3)

    def build(self, shape):
        self.used.build(shape)
        self.unused.build(shape)

    def call(self, inputs):
        return self.used(inputs)


class LazilyBuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(5, activation="tanh")
        self.head = layers.Dense(2)

    def call(self, inputs):
        return self.head(self.hidden(inputs))


def convolution():
    first = layers.Conv2D(3, 3, activation="tanh")
    return sequential((6, 6, 2), first, layers.Flatten(), layers.Dense(2))


def convolution_data(rows):
    x, y = dense_data(rows, features=72)
    return x.reshape(rows, 6, 6, 2), y


def embedding(num_ids=200):
    """With as many ids as a window of the tests looks up, its gradient stays a list of rows."""
    ids = keras.Input((5,), dtype="int32")
    return keras.Sequential([ids, layers.Embedding(num_ids, 3), layers.Flatten(), layers.Dense(2)])


def embedding_data(rows):
    """Ids of which most are there several times."""
    ids = np.random.default_rng(4).integers(0, 7, size=(rows, 5)).astype("int32")
    return ids, dense_data(rows)[1]


def masked_recurrent(**regularizers):
    cell = layers.SimpleRNN(4, return_sequences=True)
    return sequential((5, 3), layers.Masking(), cell, layers.Dense(2, **regularizers))


def masked_data(rows):
    """Sequences of 1 to 5 valid positions: microbatches of equal rows weigh very differently."""
    x, y = dense_data(rows, features=15, outputs=10)
    x, y = x.reshape(rows, 5, 3), y.reshape(rows, 5, 2)
    lengths = 1 + (np.arange(rows) // 3) % 5
    x[np.arange(5) >= lengths[:, None]] = 0.0
    return x, y


def attention():
    # Without biases: that of the keys shifts all scores of a softmax alike, so its gradient is zero
    # in exact arithmetic, and what an optimizer makes of the rounding is noise.
    inputs = keras.Input((5, 3))
    x = layers.MultiHeadAttention(num_heads=2, key_dim=3, use_bias=False)(inputs, inputs)
    x = layers.LayerNormalization()(x + layers.Dense(3)(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def attention_data(rows):
    x, y = dense_data(rows, features=15)
    return x.reshape(rows, 5, 3), y


def two_outputs():
    inputs = keras.Input((4,))
    x = layers.Dense(6, activation="tanh")(inputs)
    return keras.Model(inputs, [layers.Dense(2, name="a")(x), layers.Dense(3, name="b")(x)])


def two_outputs_data(rows):
    x, y = dense_data(rows, outputs=5)
    return x, [y[:, :2], y[:, 2:]]


def regularized():
    l2 = keras.regularizers.L2
    both = {"kernel_regularizer": l2(0.05), "activity_regularizer": MeanOfSquares(0.02)}
    hidden = layers.Dense(6, activation="tanh", **both)
    return sequential((4,), hidden, layers.Dense(2, bias_regularizer=l2(0.1)))


def frozen_layer():
    first, second = (layers.Dense(6, "tanh", trainable=trains) for trains in (True, False))
    return sequential((4,), first, second, layers.Dense(2))


# name: (model, data)
ZOO = {
    "dense": (dense_model, dense_data),
    "convolution": (convolution, convolution_data),
    "embedding": (embedding, embedding_data),
    "masked_recurrent": (masked_recurrent, masked_data),
    "attention": (attention, attention_data),
    "two_outputs": (two_outputs, two_outputs_data),
    "regularized": (regularized, dense_data),
    "frozen_layer": (frozen_layer, dense_data),
    "unused_variable": (WithUnusedVariable, dense_data),
    "lazily_built": (LazilyBuilt, dense_data),
}


def float8():
    # Without biases, whose gradients Keras sums up in bfloat16.
    hidden = layers.Dense(6, activation="tanh", use_bias=False)
    model = sequential((4,), hidden, layers.Dense(2, use_bias=False))
    for layer in model.layers:
        layer.quantize("float8")
    return model
