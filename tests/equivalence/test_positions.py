"""Embeddings of what no sample has looked up match the full batch: positions and the like."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    dense_data,
    relative_difference,
    scope,
    seeded,
)
from keras import layers, ops
from training import difference_of_fits

from ga_model import GradientAccumulator, accumulate

LENGTH = 4

one_device = pytest.mark.one_device(
    "a replica has rows of its own for positions, as in plain Keras"
)


class LooksUp(layers.Layer):
    """Looks up, in a table of its own or in another layer's, what a function makes of its input."""

    def __init__(self, ids_of, table=None):
        super().__init__()
        self.ids_of = ids_of
        self.table = table or layers.Embedding(300, 3)

    def call(self, tokens):
        return self.table(self.ids_of(tokens))


def with_static_length(tokens):
    return ops.arange(LENGTH)


def with_an_axis_for_the_samples(tokens):
    return ops.expand_dims(ops.arange(LENGTH), 0)


def with_dynamic_length(tokens):
    return ops.arange(ops.shape(tokens)[1])


def buckets(tokens):
    """The distances of all pairs of positions, at most 2."""
    positions = with_dynamic_length(tokens)
    return ops.clip(positions[:, None] - positions[None, :], -2, 2) + 2


def for_each_sample(tokens):
    return ops.broadcast_to(ops.arange(LENGTH), ops.shape(tokens))


def segments(tokens):
    return ops.zeros_like(tokens)


def tokens_and(ids_of, shares_table=False):
    """Sum the embeddings of tokens and of what `ids_of` makes of them."""
    tokens = keras.Input((None,), dtype="int32")
    table = layers.Embedding(300, 3)  # of which a window looks up less
    x = table(tokens) + LooksUp(ids_of, table if shares_table else None)(tokens)
    x = layers.Dense(3, activation="tanh")(x)
    return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def transformer():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(300, 4)(tokens) + LooksUp(with_static_length, layers.Embedding(40, 4))(
        tokens
    )
    # Biases of keys have no gradient but rounding.
    x = x + layers.MultiHeadAttention(2, 2, use_bias=False)(x, x)
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(2)(layers.Flatten()(x)))


def token_data(rows, length=LENGTH):
    tokens = np.random.default_rng(2).integers(0, 9, size=(rows, length)).astype("int32")
    return tokens, dense_data(rows)[1]


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
}


def compiled_with(optimizer="adam", **kwargs):
    return lambda: {"optimizer": OPTIMIZERS[optimizer](), "loss": "mse", **kwargs}


@one_device
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("adam", {"rows": 4, "steps": 3}),
        ("clipped", {"rows": 12, "steps": 1, "size": 5}),
        ("rmsprop", {"rows": 6, "steps": 2, "size": 5}),
        ("adam", {"rows": 6, "steps": 2, "size": 5, "loss_over": "batch"}),
    ],
    ids=str,
)
def test_positions_of_a_transformer_match_the_full_batch(optimizer, settings, float64):
    data = token_data(34)  # whose last window is partial
    difference = difference_of_fits(transformer, compiled_with(optimizer), data, **settings)
    assert difference <= TOLERANCE[float64]


@pytest.mark.gate
@one_device
@pytest.mark.parametrize("settings", [{"rows": 4, "steps": 3}, {"rows": 6, "steps": 2, "size": 5}])
def test_positions_match_the_full_batch_under_xla(settings, float64):
    arguments = compiled_with(jit_compile=True)
    difference = difference_of_fits(transformer, arguments, token_data(22), **settings)
    assert difference <= TOLERANCE[float64]


KINDS = [
    with_static_length,
    with_dynamic_length,
    with_an_axis_for_the_samples,
    buckets,
    for_each_sample,
    segments,
]


def all_kinds(length):
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(300, 3)(tokens)
    for ids_of in KINDS:
        others = LooksUp(ids_of)(tokens)
        x = x + (ops.sum(others, 1) if ids_of is buckets else others)
    x = layers.Dense(3, activation="tanh")(x)
    return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


@one_device
@pytest.mark.gate
def test_ids_match_the_full_batch_whatever_they_come_from(float64):
    settings = {"rows": 6, "steps": 2, "size": 4}
    make = functools.partial(all_kinds, length=None)
    difference = difference_of_fits(make, compiled_with(), token_data(22), **settings)
    assert difference <= TOLERANCE[float64]


@pytest.mark.gate
@pytest.mark.parametrize("size", [1, LENGTH])
def test_a_number_of_samples_that_the_graph_knows_is_told_from_a_length(size, float64):
    x, y = token_data(2 * LENGTH)
    make = functools.partial(all_kinds, length=LENGTH)
    model, reference = accumulate(seeded(make), microbatch_size=size), seeded(make)
    start = model.get_weights()
    for m in (model, reference):
        m.compile(**compiled_with()())
        m.train_on_batch(x, y)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[float64]


def test_batches_of_a_window_may_have_different_lengths(float64):
    """Positions are then those of the full batch, which is padded to the longest."""
    generator = np.random.default_rng(3)
    lengths = (3, 6, 4)
    parts = [generator.integers(0, 9, size=(4, n)) for n in lengths]
    targets = [generator.normal(size=(4, n, 2)) for n in lengths]

    def make():
        tokens = keras.Input((None,), dtype="int32")
        x = layers.Embedding(300, 3)(tokens) + LooksUp(with_dynamic_length)(tokens)
        return keras.Model(tokens, layers.Dense(2)(layers.Dense(3, activation="tanh")(x)))

    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model, reference = accumulate(seeded(make), accumulation_steps=3), seeded(make)
    start = model.get_weights()
    for m in (model, reference):
        m.compile(keras.optimizers.Adam(0.01), loss)
    for x, y in zip(parts, targets):
        model.train_on_batch(x, y, np.ones(x.shape))

    def padded(arrays):
        length = max(lengths)
        return np.concatenate(
            [
                np.pad(a, [(0, 0), (0, length - a.shape[1])] + [(0, 0)] * (a.ndim - 2))
                for a in arrays
            ]
        )

    reference.train_on_batch(*map(padded, (parts, targets, [np.ones(x.shape) for x in parts])))
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[float64]


@pytest.mark.gate
def test_replicas_have_the_rows_of_plain_keras(float64):
    x, y = token_data(12)
    with scope(2):
        model, reference = accumulate(seeded(transformer), microbatch_size=2), seeded(transformer)
    start = model.get_weights()
    for m in (model, reference):
        with m.distribute_strategy.scope():
            m.compile(**compiled_with()())
        m.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[float64]


def sorted_rows(slices):
    rows = np.concatenate([slices.indices.numpy()[:, None], slices.values.numpy()], 1)
    return rows[np.lexsort(rows.T[::-1])]


def test_an_accumulator_for_any_number_of_samples_adds_positions_and_lists_tokens(float64):
    x, y = (tf.constant(array) for array in token_data(12))
    model = seeded(transformer)
    accumulator = GradientAccumulator()
    specs = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in (x, y)]

    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        return tape.gradient(loss, model.trainable_variables)

    @tf.function(input_signature=specs)
    def add(x, y):
        variables = model.trainable_variables
        accumulator.add(gradients_of(x, y), variables, weight=tf.shape(x)[0])

    expected = [sorted_rows(gradient) for gradient in gradients_of(x, y)[:2]]
    for parts in ([slice(0, 12)], [slice(0, 5), slice(5, 10), slice(10, 12)]):
        for part in parts:
            add(x[part], y[part])
        for gradient, rows in zip(accumulator.mean()[:2], expected, strict=True):
            np.testing.assert_allclose(sorted_rows(gradient), rows, rtol=1e-11, atol=1e-15)
        accumulator.reset()


@pytest.mark.parametrize("ids_of", [with_an_axis_for_the_samples, segments])
def test_eagerly_positions_are_known_by_their_ids(ids_of, float64):
    x, y = token_data(12)
    x[0] = x[4] = np.arange(LENGTH)
    arguments = compiled_with(run_eagerly=True)
    make = functools.partial(tokens_and, ids_of)
    model, reference = accumulate(seeded(make), accumulation_steps=3), seeded(make)
    start = model.get_weights()
    for m, rows in ((model, 4), (reference, 12)):
        m.compile(**arguments())
        m.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[float64]
