"""What is read from jaxprs: whether functions treat samples one by one, and sums over them."""

import keras
import numpy as np
import pytest
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
)
from keras import layers, ops
from training import difference_and_said, difference_of_fits

from ga_model.backends.jax import rows_apart
from ga_model.backends.jax.rows_apart import kinds_of

ROWS = 6


def kind_of(function, *shapes, dtype="float32"):
    arguments = [np.ones((ROWS, *shape), dtype) for shape in shapes]
    (kind,) = kinds_of(function, arguments, ROWS)
    return str(kind)


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
    "spectral": lambda: sequential((5,), layers.SpectralNormalization(layers.Dense(3))),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", ALONE)
def test_layers_that_treat_samples_one_by_one(name):
    model = ALONE[name]()
    assert kind_of(lambda x: model(x, training=True), model.input_shape[1:]) == "rows"


def test_ids_are_looked_up_one_by_one():
    model = keras.Sequential([keras.Input((7,), dtype="int32"), layers.Embedding(9, 3)])
    assert kind_of(model, (7,), dtype="int32") == "rows"


MIXED = {
    "statistics": lambda: layers.BatchNormalization(),
    "along samples": lambda: layers.Softmax(axis=0),
    "norm of samples": lambda: layers.UnitNormalization(axis=0),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", MIXED)
def test_layers_that_combine_samples(name):
    layer = MIXED[name]()
    layer.build((None, 4))
    assert "over samples" in kind_of(lambda x: layer(x, training=True), (4,))


FUNCTIONS = {
    "each sample": (lambda x: ops.logsumexp(x, axis=-1), "rows"),
    "mean": (lambda x: ops.mean(ops.square(x)), "mean"),
    "mean of sums": (lambda x: 0.5 * ops.mean(ops.sum(x, axis=-1)), "mean"),
    "sum": (lambda x: -3.0 * ops.sum(ops.abs(x)), "sum"),
    "sum over a number": (lambda x: ops.sum(x) / 10.0, "sum"),
    "sum over samples": (lambda x: ops.sum(x) / ops.cast(ops.shape(x)[0], "float32"), "mean"),
    "sum of means": (lambda x: ops.mean(x) - ops.mean(ops.square(x)), "mean"),
    "mean times samples": (lambda x: ops.mean(x) * x.shape[0], "sum"),
    "root": (lambda x: ops.sqrt(ops.mean(x)), "a sum over samples"),
    "mean and sum": (lambda x: ops.mean(x) + ops.sum(x), "a sum over samples"),
    "an offset": (lambda x: ops.mean(x) + 1.0, "adds something to a sum"),
    "more than samples": (lambda x: ops.sum(x) / (x.shape[0] + 1e-3), "other than the number"),
    "masked": (lambda x: ops.sum(x * (x > 0)) / ops.sum(ops.cast(x > 0, "float32")), "a sum over"),
    "against others": (lambda x: ops.matmul(x, ops.transpose(x)), "combines samples with others"),
    "padded": (
        lambda x: ops.pad(x, [[1, 0], [0, 0]]),
        "puts something between samples, or around them",
    ),
    "shifted": (lambda x: ops.roll(x, 1, axis=0), "some of the samples"),
    "places": (lambda x: x * ops.arange(x.shape[0], dtype="float32")[:, None], "the place of"),
    "of one": (lambda x: x - x[:1], "samples"),
    "sorted": (lambda x: ops.sort(x, axis=0), "over samples"),
    "sorted alone": (lambda x: ops.sort(x, axis=1), "rows"),
    "divided by samples": (lambda x: x / x.shape[0], "the number of samples"),
    "times a table": (
        lambda x: x * np.linspace(0, 1, ROWS, dtype="float32")[:, None],
        "another number",
    ),
    "flat": (lambda x: ops.reshape(x, (-1, 2)), "other than one value per sample"),
    "flat and back": (lambda x: ops.reshape(ops.reshape(x, (-1, 2)), (-1, 4)), "rows"),
    "joined": (lambda x: ops.reshape(ops.transpose(x), (-1, 4)), "samples together"),
    "loop": (
        lambda x: ops.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * v), (0, x))[1],
        "rows",
    ),
    "long loop": (
        lambda x: ops.while_loop(lambda v: ops.sum(v) < 9, lambda v: (v * 2,), (x,))[0],
        "as long as a sample needs",
    ),
    "branch": (lambda x: ops.cond(ops.sum(x) > 0, lambda: x, lambda: -x), "a sum over samples"),
    "unused": (lambda x: (ops.mean(x), ops.tanh(x))[1], "rows"),
    "running sum": (lambda x: ops.cumsum(x, axis=0), "over samples"),
    "scattered": (lambda x: ops.scatter_update(x, [[0]], x[1:2]), "samples"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function, kind = FUNCTIONS[name]
    found = kind_of(function, (4,))
    assert found == kind if kind in ("rows", "mean", "sum") else kind in found


def test_one_sample_tells_no_less():
    (kind,) = kinds_of(ops.square, [np.ones((1, 4), "float32")], 1)
    assert kind == "rows"


def test_a_function_that_knows_one_number_of_samples_is_not_known():
    (kind,) = kinds_of(lambda x: ops.reshape(x, (24,)), [np.ones((6, 4), "float32")], 6)
    assert "another number of samples" in str(kind)


def fails(*args):
    raise KeyError("num_consts")  # as where a release of JAX has renamed a parameter


def test_an_equation_that_is_unlike_what_is_known_is_no_error(monkeypatch):
    monkeypatch.setitem(rows_apart._RULES, "dot_general", fails)
    settings = {"microbatch_size": 5, "loss_over": "batch"}
    difference, said = difference_and_said(dense_model, settings, rows=12)
    assert difference <= LIMIT
    (message,) = {text for text in said if "`dot_general`, of which it is not known" in text}
    assert "cannot be split into microbatches" in message


@pytest.mark.every_case
@pytest.mark.parametrize("part", ["_compare", "_of_constant", "_kind"])
def test_whatever_fails_in_reading_is_no_error(part, monkeypatch):
    monkeypatch.setattr(rows_apart, part, fails)
    assert "cannot be analyzed ('num_consts')" in kind_of(lambda x: 2.0 * x, (4,))


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
    def arguments():
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}

    assert difference_of_fits(Named, arguments, dense_data(24), rows=12, size=5) <= LIMIT
