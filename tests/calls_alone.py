"""Layers that treat samples one by one, as a trial of their call is to find on each backend."""

import keras
from keras import layers, ops


def attention():
    inputs = keras.Input((7, 8))
    heads = layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs, use_causal_mask=True)
    return keras.Model(inputs, layers.LayerNormalization()(inputs + heads))


def sequential(shape, *parts):
    return keras.Sequential([keras.Input(shape), *parts])


ALONE = {
    "dense": lambda: sequential((5,), layers.Dense(4, "gelu"), layers.Dropout(0.3)),
    "attention": attention,
    "grouped": lambda: sequential(
        (7, 8), layers.Dense(8), layers.Reshape((7, 2, 4)), layers.Permute((2, 1, 3))
    ),
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
    "images in time": lambda: sequential((3, 6, 6, 2), layers.ConvLSTM2D(3, 2)),
    "distributed": lambda: sequential((7, 5), layers.TimeDistributed(layers.Dense(3))),
    "einsum": lambda: sequential((7, 8), layers.EinsumDense("abc,cd->abd", (None, 6))),
    "noise": lambda: sequential((7, 5), layers.GaussianNoise(0.1), layers.SpatialDropout1D(0.1)),
}

# What functions of samples give: one value per sample ("rows"), a mean or a sum over samples.
FUNCTIONS = {
    "each sample": (lambda x: ops.logsumexp(x, axis=-1), "rows"),
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
    "against others": (lambda x: ops.matmul(x, ops.transpose(x)), None),
    "padded": (lambda x: ops.pad(x, [[1, 0], [0, 0]]), None),
    "shifted": (lambda x: ops.roll(x, 1, axis=0), None),
    "places": (lambda x: x * ops.arange(x.shape[0], dtype="float32")[:, None], None),
    "of one": (lambda x: x - x[:1], None),
    "sorted": (lambda x: ops.sort(x, axis=0), None),
    "sorted alone": (lambda x: ops.sort(x, axis=1), "rows"),
    "divided by samples": (lambda x: x / x.shape[0], None),
    "flat": (lambda x: ops.reshape(x, (-1, 2)), None),
    "flat and back": (lambda x: ops.reshape(ops.reshape(x, (-1, 2)), (-1, 4)), "rows"),
    "joined": (lambda x: ops.reshape(ops.transpose(x), (-1, 4)), None),
    "loop": (
        lambda x: ops.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * v), (0, x))[1],
        "rows",
    ),
    "long loop": (
        lambda x: ops.while_loop(lambda v: ops.sum(v) < 90, lambda v: (v * 2,), (x,))[0],
        None,
    ),
    "unused": (lambda x: (ops.mean(x), ops.tanh(x))[1], "rows"),
    "running sum": (lambda x: ops.cumsum(x, axis=0), None),
    "scattered": (lambda x: ops.scatter_update(x, [[0]], 2 * x[:1]), None),
    "gathered": (lambda x: ops.take_along_axis(x, ops.argsort(x, axis=-1), axis=-1), "rows"),
    "not finite": (lambda x: ops.log(-x * x), None),
    "saturated": (lambda x: ops.tanh(x - 0.5 * ops.mean(ops.relu(-x), axis=0)), None),
}
