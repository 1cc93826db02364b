"""Embeddings of what no sample has looked up match the full batch: positions and the like."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients import gradients_of
from helpers import assert_changed, assert_close, dense_data, scope, seeded
from keras import layers, ops
from training import compiled, train_pair

from ga_model import GradientAccumulator, accumulate

LENGTH = 4

one_device = pytest.mark.one_device(
    "a replica has rows of its own for positions, as in plain Keras"
)


def positions(tokens):
    return ops.arange(ops.shape(tokens)[1])


def buckets(tokens):
    """The distances of all pairs of positions, at most 2."""
    distances = positions(tokens)[:, None] - positions(tokens)[None, :]
    return ops.clip(distances, -2, 2) + 2


KINDS = {  # what is looked up
    "positions of a known length": lambda tokens: ops.arange(LENGTH),
    "positions": positions,
    "with an axis for the samples": lambda tokens: ops.expand_dims(ops.arange(LENGTH), 0),
    "buckets": buckets,
    "for each sample": lambda tokens: ops.broadcast_to(ops.arange(LENGTH), ops.shape(tokens)),
    "segments": ops.zeros_like,
}


class LooksUp(layers.Layer):
    def __init__(self, kind):
        super().__init__()
        self.ids_of, self.table = KINDS[kind], layers.Embedding(300, 3)

    def call(self, tokens):
        return self.table(self.ids_of(tokens))


def tokens_and(*kinds, length=LENGTH, pools=True):
    """Sum the embeddings of tokens and of what each of `kinds` makes of them."""
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(300, 3)(tokens)
    for kind in kinds:
        others = LooksUp(kind)(tokens)
        x = x + (ops.sum(others, 1) if kind == "buckets" else others)
    x = layers.Dense(3, activation="tanh")(x)
    return keras.Model(tokens, layers.Dense(2)(ops.mean(x, 1) if pools else x))


of_all_kinds = functools.partial(tokens_and, *KINDS)
of_positions = functools.partial(tokens_and, "positions of a known length")


def token_data(rows):
    """Some of the tokens are alike positions, by which these are known eagerly."""
    tokens = np.random.default_rng(2).integers(0, 9, size=(rows, LENGTH)).astype("int32")
    tokens[0] = tokens[4] = np.arange(LENGTH)
    return tokens, dense_data(rows)[1]


def adam(**arguments):
    return {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", **arguments}


eagerly = functools.partial(adam, run_eagerly=True)


def clipped():
    return {"optimizer": keras.optimizers.SGD(0.5, clipnorm=0.05), "loss": "mse"}


WINDOWS, BOTH = {"rows": 4, "steps": 3}, {"rows": 6, "steps": 2, "size": 5}


@one_device
@pytest.mark.parametrize(
    ("make", "compile_args", "settings"),
    [
        (functools.partial(of_all_kinds, length=None), adam, BOTH),
        (of_positions, clipped, {"rows": 12, "steps": 1, "size": 5}),
        (of_positions, adam, WINDOWS),
        (of_positions, adam, {**BOTH, "loss_over": "batch"}),
        (of_positions, functools.partial(adam, jit_compile=True), BOTH),
        (functools.partial(tokens_and, "with an axis for the samples"), eagerly, WINDOWS),
        (functools.partial(tokens_and, "segments"), eagerly, WINDOWS),
    ],
)
def test_what_no_sample_looks_up_matches_the_full_batch(make, compile_args, settings, float64):
    """The last window is partial."""
    assert_close(*train_pair(make, compile_args, token_data(34), **settings))


@pytest.mark.gate
@pytest.mark.parametrize("size", [LENGTH, 1])
def test_a_number_of_samples_that_the_graph_knows_is_told_from_a_length(size, float64):
    data, rows = token_data(2 * LENGTH), 2 * LENGTH
    assert_close(*train_pair(of_all_kinds, adam, data, rows=rows, size=size))


def test_batches_of_a_window_may_have_different_lengths(float64):
    """Positions are then those of the full batch, which is padded to the longest."""

    def make():
        return tokens_and("positions", length=None, pools=False)

    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model, reference = accumulate(seeded(make), accumulation_steps=3), seeded(make)
    start = model.get_weights()
    for m in (model, reference):
        m.compile(keras.optimizers.Adam(0.01), loss)
    generator = np.random.default_rng(3)
    full_batch = np.zeros((12, 6), int), np.zeros((12, 6, 2)), np.zeros((12, 6))
    for begin, length in ((0, 3), (4, 6), (8, 4)):
        batch = [array[begin : begin + 4, :length] for array in full_batch]
        batch[0][:] = generator.integers(0, 9, size=(4, length))
        batch[1][:] = generator.normal(size=(4, length, 2))
        batch[2][:] = 1.0
        model.train_on_batch(*batch)
    reference.train_on_batch(*full_batch)
    assert_close(model, reference, start)


@pytest.mark.gate
def test_replicas_have_the_rows_of_plain_keras(float64):
    trained = []
    for size in (2, None):
        with scope(2):
            model = compiled(of_positions, microbatch_size=size, **adam())
        start = model.get_weights()
        model.fit(*token_data(12), batch_size=12, epochs=2, shuffle=False, verbose=0)
        trained.append(model)
    assert_close(*trained, start)


def sorted_rows(slices):
    rows = np.concatenate([slices.indices.numpy()[:, None], slices.values.numpy()], 1)
    return rows[np.lexsort(rows.T[::-1])]


def test_an_accumulator_for_any_number_of_samples_adds_positions_and_lists_tokens(float64):
    x, y = (tf.constant(array) for array in token_data(12))
    model = seeded(of_positions)
    accumulator = GradientAccumulator()
    specs = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in (x, y)]

    def gradients(x, y):
        return gradients_of(model, lambda: tf.reduce_mean(tf.square(model(x) - y)))

    @tf.function(input_signature=specs)
    def add(x, y):
        accumulator.add(gradients(x, y), model.trainable_variables, weight=tf.shape(x)[0])

    expected = [sorted_rows(gradient) for gradient in gradients(x, y)[:2]]
    for parts in ([slice(0, 12)], [slice(0, 5), slice(5, 10), slice(10, 12)]):
        for part in parts:
            add(x[part], y[part])
        for gradient, rows in zip(accumulator.mean()[:2], expected, strict=True):
            np.testing.assert_allclose(sorted_rows(gradient), rows, rtol=1e-11, atol=1e-15)
        accumulator.reset()


def test_an_accumulator_refuses_rows_that_are_as_many_and_others():
    table, first = keras.Variable(np.ones((9, 2), "float32")), tf.Variable(0)
    accumulator = GradientAccumulator()

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def add(x):
        with tf.GradientTape() as tape:
            rows = tf.gather(tf.convert_to_tensor(table), first + tf.range(3))
            loss = tf.reduce_mean(x) * tf.reduce_sum(rows)
        accumulator.add(tape.gradient(loss, [table.value]), [table], weight=tf.shape(x)[0])

    add(tf.ones(4))
    first.assign(1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="As many rows of a table as `add`"):
        add(tf.ones(4))


class UsedInTwoWays(keras.Model):
    """A table of which full batches look up rows, and the ragged last one all of it."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(7, 3), initializer="uniform", name="table")
        self.dense = keras.layers.Dense(2)

    def call(self, ids):
        table = tf.convert_to_tensor(self.table)
        if ids.shape[0] == 4:
            return self.dense(tf.gather(table, ids))
        return self.dense(tf.one_hot(ids, 7, dtype=table.dtype) @ table)


@one_device
@pytest.mark.parametrize("first", [4, 2])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_gradient_that_is_sparse_in_some_batches_only(jit_compile, first, float64):
    ids = np.random.default_rng(0).integers(0, 7, size=30).astype("int32")
    y = dense_data(30)[1]
    trained = []
    for wrap in (True, False):
        model = seeded(UsedInTwoWays)
        model(ids[:1])
        if wrap:
            model = accumulate(model, accumulation_steps=3)
        model.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=jit_compile)
        start = model.get_weights()
        for begin in range(0, 30, 10):
            window = np.arange(begin, begin + 10)
            batches = np.split(window, [first, first + 4]) if wrap else [window]
            for rows in batches:
                model.train_on_batch(ids[rows], y[rows])
        trained.append(model)
    assert_changed(model.get_weights(), start)
    assert_close(*trained, start)
