"""Layers that treat samples one by one, as a trial of their call is to find on each backend."""

import keras
from keras import layers


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
