"""Losses that compare rows, with the activations of one microbatch.

References are plain Keras on the full batch. Where a model draws random numbers or has statistics,
the reference calls it on the rows of one microbatch after the other within its one pass, so that it
draws the same numbers: `OneAfterTheOther`.

Losses over rows have blind spots: adding the same number to all scores of a row changes nothing, so
such a bias has no gradient in exact arithmetic, and Adam makes full steps of its rounding. None of
the models here has one.
"""

import dataclasses
import functools
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    dense_data,
    dense_model,
    in_the_sweep,
    mirrored,
    relative_difference,
    scope,
    seeded,
)
from keras import layers, ops
from training import difference_of_fits, train_pair
from zoo import ZOO

from ga_model import AccumulatingModel, accumulate, check_equivalence
from ga_model.bench import _bench
from ga_model.bench._bench_cases import CASES, random_numbers
from ga_model.tools._process import in_own_process

# What compares rows.


def tower():
    return keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(4)])


def two_towers(rate=0.0):
    """Queries and keys, encoded side by side."""
    queries, keys = keras.Input((6,)), keras.Input((5,))
    encoded = [tower()(layers.Dropout(rate)(x)) for x in (queries, keys)]
    return keras.Model([queries, keys], layers.Concatenate()(encoded))


def info_nce(y, encoded):
    """Of all keys of the batch, a query's own is to be the nearest, and the other way round."""
    queries, keys = (tf.math.l2_normalize(part, -1) for part in tf.split(encoded, 2, -1))
    scores = 5.0 * queries @ tf.transpose(keys)
    own = tf.range(tf.shape(scores)[0])
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
    return entropy(own, scores) + entropy(own, tf.transpose(scores))


def batch_hard_triplet(y, embeddings):
    """The farthest row of the same class, against the nearest of another (1703.07737)."""
    squares = tf.reduce_sum(tf.square(embeddings[:, None] - embeddings[None]), -1)
    is_same = tf.cast(tf.equal(y, tf.transpose(y)), squares.dtype)
    farthest = tf.reduce_max(squares * is_same, 1)
    nearest = tf.reduce_min(squares + 1e3 * is_same, 1)
    return tf.nn.softplus(farthest - nearest)


def supervised_contrastive(y, embeddings):
    """Rows of a class attract one another (2004.11362)."""
    embeddings = tf.math.l2_normalize(embeddings, -1)
    scores = 2.0 * embeddings @ tf.transpose(embeddings)
    itself = tf.eye(tf.shape(scores)[0], dtype=scores.dtype)
    log_sum = tf.math.log(tf.reduce_sum(tf.exp(scores) * (1.0 - itself), 1, keepdims=True))
    is_same = tf.cast(tf.equal(y, tf.transpose(y)), scores.dtype) - itself
    return -tf.reduce_sum((scores - log_sum) * is_same, 1) / (tf.reduce_sum(is_same, 1) + 1.0)


def dice(y, y_pred):
    """One number for all rows."""
    both = tf.reduce_sum(y * y_pred)
    return 1.0 - 2.0 * both / (tf.reduce_sum(y) + tf.reduce_sum(y_pred))


def pairs(rows):
    x, _ = dense_data(rows, features=11)
    return [x[:, :6], x[:, 6:]], np.zeros((rows, 1), x.dtype)


def classes(rows):
    x, _ = dense_data(rows)
    return x, np.arange(rows)[:, None] % 3


def binary(rows):
    x, y = dense_data(rows)
    return x, (y > 0).astype(x.dtype)


def sigmoid_model():
    return keras.Sequential([dense_model(), layers.Activation("sigmoid")])


def encoder():
    return keras.Sequential([dense_model(outputs=6), layers.LayerNormalization(center=False)])


def two_masks():
    """Two outputs of which each has valid positions of its own."""
    inputs = [keras.Input((5, 3)), keras.Input((4, 2))]
    outputs = [
        layers.Dense(2, name=name)(layers.SimpleRNN(4, return_sequences=True)(layers.Masking()(x)))
        for name, x in zip("ab", inputs)
    ]
    return keras.Model(inputs, outputs)


def two_masks_data(rows):
    values, targets = dense_data(rows, features=23, outputs=18)
    x = [values[:, :15].reshape(rows, 5, 3), values[:, 15:].reshape(rows, 4, 2)]
    x[0][np.arange(5) >= 1 + (np.arange(rows) // 3 % 5)[:, None]] = 0.0
    x[1][np.arange(4) >= 1 + (np.arange(rows) // 2 % 4)[:, None]] = 0.0
    y = [targets[:, :10].reshape(rows, 5, 2), targets[:, 10:].reshape(rows, 4, 2)]
    return x, y


# name: (model, loss, data)
LOSSES = {
    "in-batch InfoNCE": (two_towers, info_nce, pairs),
    "batch-hard triplet": (encoder, batch_hard_triplet, classes),
    "supervised contrastive": (encoder, supervised_contrastive, classes),
    "two outputs with masks of their own": (two_masks, "mse", two_masks_data),
    "Dice": (sigmoid_model, dice, binary),
}

by_loss = pytest.mark.parametrize("name", LOSSES)


# Of `train_pair`: batches of 12 rows in parts of 5, 5 and 2.
IN_PARTS = {"rows": 12, "steps": 1, "size": 5, "loss_over": "batch"}


def compile_args(loss, optimizer=None, **kwargs):
    optimizer = optimizer or functools.partial(keras.optimizers.Adam, 0.01)
    return lambda: {"optimizer": optimizer(), "loss": loss, **kwargs}


def difference(name, rows=34, batch=12, steps=1, size=5, loss_over="batch", **kwargs):
    """Return the relative difference from plain Keras, after three batches in two epochs."""
    make, loss, data = LOSSES[name]
    model, reference, start = train_pair(
        make,
        compile_args(loss, **kwargs),
        data(rows),
        rows=batch,
        steps=steps,
        size=size,
        loss_over=loss_over,
    )
    return relative_difference(model.get_weights(), reference.get_weights(), start)


@by_loss
def test_losses_that_compare_rows_match_the_whole_batch(name, dtype):
    assert difference(name) < TOLERANCE[dtype]


@by_loss
def test_without_it_they_do_not(name, float64):
    if "masks" in name:  # exact by another way
        assert difference(name, loss_over="microbatch") < TOLERANCE[float64]
    else:
        with pytest.warns(UserWarning, match="combines several samples|is not linear"):
            assert difference(name, loss_over="microbatch") > 1e-2


XLA, EAGER = {"jit_compile": True}, {"run_eagerly": True}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("in-batch InfoNCE", XLA),
        ("in-batch InfoNCE", EAGER),
        ("two outputs with masks of their own", EAGER),
        *(in_the_sweep(n, XLA) for n in LOSSES if n != "in-batch InfoNCE"),
        *(in_the_sweep(n, EAGER) for n in LOSSES if "InfoNCE" not in n and "masks" not in n),
    ],
)
def test_they_match_under_xla_and_eagerly(name, way, float64):
    assert difference(name, **way) < TOLERANCE[float64]


@pytest.mark.parametrize("steps_per_execution", [2])
def test_several_batches_per_call_match(steps_per_execution, float64):
    name = "in-batch InfoNCE"
    assert difference(name, steps_per_execution=steps_per_execution) < TOLERANCE[float64]


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("name", sorted(ZOO))
def test_losses_of_single_rows_match(name, float64):
    """What was exact before: embeddings, recurrence, attention, regularizers, frozen layers."""
    make, data = ZOO[name]
    assert (
        difference_of_fits(make, compile_args("mse"), data(34), **IN_PARTS) < (TOLERANCE[float64])
    )


@pytest.mark.filterwarnings("ignore:Gradients of microbatches add up")
@pytest.mark.parametrize("way", [{}, {"jit_compile": True}])
def test_a_window_is_the_mean_of_its_batches(way, float64):
    def in_groups(y, encoded):  # of 12 rows
        return tf.concat([info_nce(None, part) for part in tf.split(encoded, 3)], 0)

    make, _, data = LOSSES["in-batch InfoNCE"]
    start = seeded(make).get_weights()
    weights = []
    for loss, settings, rows in [
        (in_groups, {}, 36),
        (
            info_nce,
            {"accumulation_steps": 3, "microbatch_size": 5, "loss_over": "batch"},
            12,
        ),
    ]:
        model = accumulate(seeded(make), **settings)
        model.compile(keras.optimizers.Adam(0.01), loss, **way)
        model.fit(*data(72), batch_size=rows, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert relative_difference(weights[1], weights[0], start) < TOLERANCE[float64]


# What models do when they are called.


class OneAfterTheOther(keras.Model):
    """Calls a model on 5 of 12 rows, on the next 5 and on the rest."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def call(self, inputs, training=False):
        parts = [
            self.model(
                keras.tree.map_structure(lambda x, b=b: x[b : b + 5], inputs), training=training
            )
            for b in (0, 5, 10)
        ]
        return keras.tree.map_structure(lambda *outputs: ops.concatenate(outputs, 0), *parts)


def with_dropout():
    return two_towers(rate=0.4)


def with_augmentation():
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.RandomFlip(),
            layers.GaussianNoise(0.5),
            layers.Conv2D(3, 3, activation="tanh"),
            layers.SpatialDropout2D(0.3),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )


def with_statistics():
    hidden = layers.Dense(6, use_bias=False)
    return keras.Sequential([keras.Input((4,)), hidden, layers.BatchNormalization()])


def with_overwritten_weights():
    hidden = layers.SpectralNormalization(layers.Dense(6, activation="tanh"))
    return keras.Sequential([keras.Input((4,)), hidden, layers.Dense(5)])


class DropoutCell(layers.SimpleRNNCell):
    """Draws in the loop over the positions."""

    def __init__(self):
        super().__init__(4)
        self.drop = layers.Dropout(0.3)

    def call(self, inputs, states, training=False):
        output, states = super().call(inputs, states)
        return self.drop(output, training=training), states


class InnerGraphs(layers.Layer):
    """Draws in a branch, and in a function of its own."""

    def __init__(self):
        super().__init__()
        self.drop = layers.Dropout(0.3)

    def call(self, inputs, training=False):
        def draw():
            return self.drop(inputs, training=training)

        return tf.function(draw)() + tf.cond(tf.size(inputs) > 0, draw, lambda: inputs)


class TracedBefore(keras.Model):
    """A call that is a function of its own, and was traced long ago."""

    def __init__(self):
        super().__init__()
        self.drop, self.dense = layers.Dropout(0.4), layers.Dense(5)
        self(np.ones((1, 4)), training=True)

    @tf.function(reduce_retracing=True)
    def call(self, inputs, training=False):
        return self.dense(self.drop(inputs, training=training))


def with_loops_and_branches():
    inputs = keras.Input((5, 4))
    recurrent = layers.RNN(DropoutCell())
    hidden = recurrent(inputs) + recurrent(2.0 * inputs)
    return keras.Model(inputs, layers.Dense(5)(InnerGraphs()(hidden)))


def sequences_of_classes(rows):
    return dense_data(rows, features=20)[0].reshape(rows, 5, 4), classes(rows)[1]


def images_of_classes(rows):
    return dense_data(rows, features=72)[0].reshape(rows, 6, 6, 2), classes(rows)[1]


@pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")
@pytest.mark.parametrize(
    ("make", "loss", "data", "way"),
    [
        (make, loss, data, way)
        if not way or make in (with_dropout, TracedBefore)
        else in_the_sweep(make, loss, data, way)
        for make, loss, data in [
            (with_dropout, info_nce, pairs),
            (with_augmentation, supervised_contrastive, images_of_classes),
            (with_loops_and_branches, supervised_contrastive, sequences_of_classes),
            (TracedBefore, supervised_contrastive, classes),
        ]
        for way in ({}, XLA, EAGER)
    ],
)
def test_both_passes_draw_the_same_numbers(make, loss, data, way, float64):
    """Weights and seeds are those of one pass through plain Keras."""
    trained = []
    for wrap, settings in [
        (OneAfterTheOther, {}),
        (accumulate, {"microbatch_size": 5, "loss_over": "batch"}),
    ]:
        inner = seeded(make)
        start = [np.array(v) for v in inner.variables]
        model = wrap(inner, **settings)
        model.compile(keras.optimizers.Adam(0.01), loss, **way)
        model.fit(*data(36), batch_size=12, epochs=2, shuffle=False, verbose=0)
        trained.append([np.array(v, "float64") for v in inner.variables])
    assert len(start) >= 3
    assert any(v.dtype.kind in "iu" for v in start)  # seeds
    assert relative_difference(trained[1], trained[0], start) < TOLERANCE[float64]


@pytest.mark.filterwarnings("ignore:.*it writes to")
def test_a_call_that_overwrites_weights_does_so_once(float64):
    fits = with_overwritten_weights, compile_args(supervised_contrastive), classes(36)
    assert difference_of_fits(*fits, **IN_PARTS) < TOLERANCE[float64]


def test_dropout_is_not_switched_off(float64):
    weights = []
    for make in (two_towers, with_dropout):
        model = accumulate(seeded(make), microbatch_size=5, loss_over="batch")
        model.compile("sgd", info_nce)
        model.fit(*pairs(12), batch_size=12, verbose=0)
        weights.append(model.get_weights())
    assert not np.allclose(weights[0][0], weights[1][0])


class AddsLosses(keras.layers.Layer):
    """Adds a mean over rows and the values of the rows."""

    def call(self, inputs):
        self.add_loss(0.3 * ops.mean(ops.square(inputs)))
        self.add_loss(0.01 * ops.sum(ops.square(inputs), axis=-1))
        return inputs


def with_added_losses():
    inputs = keras.Input((4,))
    hidden = layers.Dense(
        6,
        activation="tanh",
        kernel_regularizer=keras.regularizers.L2(0.05),
        activity_regularizer=keras.regularizers.L2(0.02),
    )(inputs)
    return keras.Model(inputs, layers.Dense(4)(AddsLosses()(hidden)))


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables", "ignore:The terms of")
def test_added_losses_keep_what_they_average_over(float64):
    """A sum beside means is exact over full windows of equal batches, and only if it is known."""
    assert (
        difference_of_fits(
            with_added_losses,
            compile_args(None),
            classes(48),
            rows=12,
            steps=2,
            size=5,
            loss_over="batch",
        )
        < TOLERANCE[float64]
    )


class CountsCalls(keras.layers.Layer):
    """Tracks a metric and counts rows, both while it is called."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean_input")

    def build(self, shape):
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.mean.update_state(inputs)
        self.rows.assign_add(ops.cast(ops.shape(inputs)[0], self.rows.dtype))
        return inputs


@pytest.mark.filterwarnings("ignore:.*it writes to")
def test_what_layers_track_is_tracked_once(float64):
    def make():
        return keras.Sequential([keras.Input((4,)), CountsCalls(), layers.Dense(4)])

    model, reference, _ = train_pair(
        make,
        compile_args(supervised_contrastive),
        classes(34),
        **IN_PARTS,
    )
    assert model.layers[0].rows.numpy() == reference.layers[0].rows.numpy() == 68
    names = ("loss", "mean_input")
    for name in names:
        np.testing.assert_allclose(
            model.history.history[name], reference.history.history[name], rtol=1e-12
        )


def probabilities(activation):
    def make():
        # Far from one half, where Keras cuts probabilities off.
        return keras.Sequential([dense_model(outputs=3), layers.Rescaling(30.0), activation])

    return make


def one_hot(rows):
    x, _ = dense_data(rows)
    return x, np.eye(3, dtype=x.dtype)[np.arange(rows) % 3]


class Bare(keras.layers.Layer):
    """An operation of TensorFlow, which leaves no logits on its result."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


@pytest.mark.parametrize("way", [{}, {"run_eagerly": True}])
@pytest.mark.parametrize(
    ("activation", "loss"),
    [
        (lambda: layers.Activation("softmax"), "categorical_crossentropy"),
        (lambda: layers.Activation("sigmoid"), "binary_crossentropy"),
        (lambda: Bare(tf.nn.softmax), "categorical_crossentropy"),
        (lambda: Bare(tf.sigmoid), "binary_crossentropy"),
        (lambda: Bare(tf.nn.softmax), "binary_crossentropy"),
        (lambda: Bare(tf.nn.relu), "mse"),
    ],
)
def test_losses_find_the_logits(activation, loss, way, float64):
    """Keras's cross-entropies go past a softmax, which is exact, or else cut it off."""

    def make():
        return probabilities(activation())()

    arguments = compile_args(loss, metrics=["accuracy"], **way)
    assert difference_of_fits(make, arguments, one_hot(34), **IN_PARTS) < (TOLERANCE[float64])


class Complex(keras.Model):
    """A complex output, one that is reshaped, and what decays: a scale and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")
        self.teacher = layers.Dense(4, trainable=False)
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, inputs, training=False):
        hidden = self.dense(inputs) * self.teacher(inputs) * self.scale
        same = tf.reshape(hidden, (tf.shape(hidden)[0], -1))  # of unknown size, but always 4
        return tf.complex(hidden, 2.0 * hidden), same

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        for decaying in (self.scale, self.teacher.kernel):
            decaying.assign(decaying * 0.9)
        return tf.reduce_mean(tf.square(tf.math.imag(y_pred[0]))) + tf.reduce_mean(
            supervised_contrastive(y, y_pred[1])
        )


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("way", [{}, {"jit_compile": True}, {"run_eagerly": True}])
def test_the_second_pass_sees_what_the_first_one_saw(way, size, float64):
    """Also where `compute_loss` has written to a variable in between."""
    model, reference, start = train_pair(
        Complex,
        compile_args(None, **way),
        classes(34),
        rows=12,
        steps=1,
        size=size,
        loss_over="batch",
    )
    assert model.scale.numpy() == reference.scale.numpy() < 0.6
    assert (
        relative_difference(
            [w.numpy() for w in model.trainable_weights],
            [w.numpy() for w in reference.trainable_weights],
            start[:2],
        )
        < (TOLERANCE[float64])
    )


def test_an_unbuilt_model_takes_sparse_rows(float64):
    x, y = classes(12)
    weights = []
    for settings in ({}, {"microbatch_size": 5, "loss_over": "batch"}):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(3)])
        model = accumulate(model, **settings)
        model.compile("sgd", supervised_contrastive)
        rows = tf.sparse.from_dense(x)
        dataset = tf.data.Dataset.from_tensors((rows, y)).repeat(2)
        model.fit(dataset, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_outputs_of_other_lengths_are_named(monkeypatch):
    monkeypatch.setattr("ga_model.calls._call_checks.why_mixed", lambda *_: None)  # who is trusted

    class Padded(keras.Model):
        def call(self, inputs):
            hidden = tf.io.parse_tensor(tf.io.serialize_tensor(inputs), tf.int32)
            shape = tf.stack([tf.shape(inputs)[0], tf.reduce_max(hidden)])
            return tf.ones(shape)[..., None] * self.scale

        def build(self, shape):
            self.scale = self.add_weight(shape=())

    model = accumulate(Padded(), microbatch_size=2, loss_over="batch")
    model.compile("sgd", lambda y, y_pred: tf.reduce_sum(y_pred))
    dataset = tf.data.Dataset.from_tensors((tf.constant([[1], [2], [3], [3]]), tf.zeros((4, 1))))
    with pytest.raises(
        ValueError, match=r"^To be split into microbatches.*Pad it to a fixed length"
    ):
        model.fit(dataset, shuffle=False, verbose=0)


# Precision, devices, faults.


def test_an_overflow_skips_the_batch_and_halves_the_scale_once():
    keras.config.set_dtype_policy("mixed_float16")
    model = accumulate(dense_model(), microbatch_size=5, loss_over="batch")
    model.compile("sgd", supervised_contrastive)
    x, y = classes(12)
    model.train_on_batch(x, y)
    scale, before = float(model.optimizer.dynamic_scale.numpy()), model.get_weights()
    x[7] = 1e30
    model.train_on_batch(x, y)
    assert float(model.optimizer.dynamic_scale.numpy()) == scale / 2
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings(
    "ignore:Microbatches of", "ignore:BatchNormalization layers in training mode"
)
def test_a_batch_that_is_not_finite_is_left_out_whole(float64):
    """The rows of a batch are compared with one another, so none can be left out alone."""
    x, y = classes(36)
    x[14] = np.nan
    model = accumulate(with_statistics(), microbatch_size=5, loss_over="batch", skip_nonfinite=True)
    model.compile(keras.optimizers.SGD(0.1), supervised_contrastive)
    model.fit(x, y, batch_size=12, verbose=0, shuffle=False)
    assert model.num_skipped_microbatches == 1
    assert model.optimizer.iterations.numpy() == 2
    assert all(np.all(np.isfinite(w)) for w in model.get_weights())


@pytest.mark.gate
@pytest.mark.one_device("makes replicas itself")
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "Dice"])
def test_each_replica_compares_its_own_rows_as_in_plain_keras(name, float64):
    """With two masks, which need no comparison, the update is that of one device.

    Of a loss that is one number for all rows, plain Keras takes the sum over replicas.
    """
    make, loss, data = LOSSES[name]
    weights = []
    is_plain_on_one = "masks" in name
    for settings, replicas in [
        ({}, 1 if is_plain_on_one else 2),
        ({"microbatch_size": 5, "loss_over": "batch"}, 2),
    ]:
        with scope(replicas):
            model = accumulate(seeded(make), **settings)
            model.compile(keras.optimizers.Adam(0.01), loss)
        start = model.get_weights()
        x, y = data(34 if is_plain_on_one else 36)  # plain Keras weighs replicas alike
        model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert relative_difference(weights[1], weights[0], start) < TOLERANCE[float64]


@pytest.mark.gate
@pytest.mark.one_device("makes replicas itself")
@pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")
@pytest.mark.filterwarnings("ignore:Gradients of microbatches add up")
def test_random_numbers_and_statistics_on_replicas(float64):
    """After a batch, both replicas have what one pass by microbatches leaves."""
    states = []
    for loss_over in ("microbatch", "batch"):
        with mirrored(2).scope():
            model = seeded(
                lambda: keras.Sequential(
                    [keras.Input((4,)), layers.Dropout(0.5), with_statistics()]
                )
            )
            model = accumulate(model, microbatch_size=5, loss_over=loss_over)
            model.compile(keras.optimizers.SGD(0.1), supervised_contrastive)
        model.fit(*classes(12), batch_size=12, verbose=0, shuffle=False)
        variables = model.non_trainable_variables
        states.append([np.array(copy) for v in variables for copy in v.value.values])
    assert len(states[0]) == 6  # a mean, a variance and a seed on two replicas
    for one_pass, two_passes in zip(*states, strict=True):
        np.testing.assert_allclose(two_passes, one_pass, rtol=1e-12)
    # A replica's 6 rows go through in two parts, and each draws once.
    assert sorted(int(v[1]) for v in states[1] if v.dtype.kind in "iu") == [2, 2]


class SharedScale(Complex):
    """Has a variable that replicas exchange when it is written to, which only the loss does."""

    def __init__(self):
        super().__init__()
        settings = {"initializer": "ones", "trainable": False, "aggregation": "mean"}
        self.scale = self.add_weight(shape=(), **settings)


@pytest.mark.gate
@pytest.mark.one_device("makes replicas itself")
def test_a_variable_that_replicas_exchange_may_change_in_the_loss(float64):
    weights = []
    for settings in ({}, {"microbatch_size": 5, "loss_over": "batch"}):
        with mirrored(2).scope():
            model = seeded(SharedScale)
            model(np.zeros((1, 4)))
            model = accumulate(model, **settings)
            model.compile(keras.optimizers.SGD(0.1))
        start = [w.numpy() for w in model.trainable_weights]
        model.fit(*classes(36), batch_size=12, verbose=0, shuffle=False)
        weights.append([w.numpy() for w in model.trainable_weights])
    assert relative_difference(weights[1], weights[0], start) < TOLERANCE[float64]


calls = []  # which no layer has: theirs are put back


class Counting(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, inputs):
        calls.append(self)
        return self.dense(inputs)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_model_is_traced_once_per_pass(jit_compile):
    model = Counting()
    model(np.zeros((1, 4)))
    model = accumulate(model, microbatch_size=5, loss_over="batch")
    model.compile("sgd", supervised_contrastive, jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    calls.clear()
    for rows in (34, 24, 9):
        dataset = tf.data.Dataset.from_tensor_slices(classes(rows)).batch(12)
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert len(calls) == 2


def memory_of(way, loss_over):
    """Return the bytes that training on batches of 16 microbatches of 16 rows adds, here."""

    def make_model():  # nearly all of the memory is activations
        inputs = keras.Input((64, 64, 3))
        x = inputs
        for _ in range(12):
            x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
        model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
        return accumulate(model, loss_over=loss_over)

    data = random_numbers(64, 64, 3)
    case = dataclasses.replace(
        CASES["convolutional"], make_model=make_model, make_data=data, rows=16
    )
    CASES["twelve convolutions"] = case
    return _bench.measure_memory("twelve convolutions", False, way, 16).size


@pytest.mark.gate
def test_memory_is_that_of_a_microbatch():
    """Peak memory in processes of their own."""
    ways = [
        (_bench.REFERENCE, "microbatch"),
        (_bench.SIZE, "microbatch"),
        (_bench.SIZE, "batch"),
        (_bench.WHOLE, "microbatch"),
    ]
    plain, split, twice, whole = (in_own_process(way[0], memory_of, *way) for way in ways)
    assert 0 < split < 1.5 * plain
    assert 0 < twice < 1.5 * plain
    assert twice < 1.2 * split
    assert max(split, twice) < 0.25 * whole


# Settings and wrong uses.


def functional(model_class):
    inputs = keras.Input((4,))
    return model_class(inputs, layers.Dense(4)(inputs))


class OwnCall(keras.Model):
    def __call__(self, *args, **kwargs):
        return 2.0 * super().__call__(*args, **kwargs)


def test_a_call_method_of_ones_own_runs_once(float64):
    make = functools.partial(functional, OwnCall)
    fits = make, compile_args(supervised_contrastive), classes(34)
    assert difference_of_fits(*fits, **IN_PARTS) < TOLERANCE[float64]


def test_the_setting_is_kept_and_saved(tmp_path):
    class Net(AccumulatingModel, keras.Model):
        pass

    model = functional(Net)
    assert model.loss_over == "auto"
    model.compile("sgd", supervised_contrastive, microbatch_size=5, loss_over="batch")
    model.compile("sgd", "mse")
    assert model.loss_over == "batch"
    assert model.get_compile_config()["loss_over"] == "batch"
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Net": Net})
    assert (again.loss_over, again.microbatch_size) == ("batch", 5)
    assert accumulate(dense_model(), loss_over="batch").loss_over == "batch"


@pytest.mark.filterwarnings("ignore:Gradients of microbatches add up")
def test_it_can_be_switched_between_fits(float64):
    x, y = classes(12)
    model = accumulate(seeded(encoder), microbatch_size=5)
    model.compile(keras.optimizers.SGD(0.1), supervised_contrastive)
    start = model.get_weights()
    losses = []
    for loss_over in ("microbatch", "batch", "microbatch"):
        model.loss_over = loss_over
        model.set_weights(start)
        model.reset_metrics()
        losses.append(model.train_on_batch(x, y))
    assert losses[0] == losses[2] != losses[1]


class AgainstAllRows(keras.layers.Layer):
    def call(self, inputs):
        return ops.matmul(inputs, ops.transpose(inputs))


class Scalar(keras.layers.Layer):
    def call(self, inputs):
        return ops.mean(inputs)


class SameForAll(keras.layers.Layer):
    """Gives as many rows as a microbatch has, by chance."""

    def call(self, inputs):
        return ops.ones((6, 4)) + 0.0 * ops.mean(inputs)


class Unseeded(keras.layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)


class UnseededInside(keras.layers.Layer):
    def call(self, inputs):
        return tf.function(lambda x: x * tf.random.uniform((), dtype=x.dtype))(inputs)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Scalar, r"shape \(\)"),
        (AgainstAllRows, "depend on other samples|for 3 samples"),
        (SameForAll, "depend on other samples"),
        (Unseeded, "RandomStandardNormal"),
        (UnseededInside, "RandomUniform"),
    ],
)
def test_models_that_can_not_be_called_twice_run_whole_and_tell(layer, reason, eager, float64):
    weights = []
    for size in (None, 6):
        model = keras.Sequential([keras.Input((4,)), seeded(lambda: layers.Dense(4)), layer()])
        model = accumulate(model, microbatch_size=size)
        model.compile("sgd", lambda y, y_pred: tf.reduce_sum(y_pred), run_eagerly=eager)
        start = model.get_weights()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            model.fit(*classes(12), batch_size=12, epochs=2, verbose=0)
        weights.append(model.get_weights())
        said = [str(w.message) for w in caught if "cannot be split" in str(w.message)]
        assert len(said) == (1 if size else 0)
        assert all(re.search(reason, text) for text in said)
    if "Unseeded" not in layer.__name__:
        assert relative_difference(*weights, start) < TOLERANCE[float64]


@pytest.mark.gate
def test_check_equivalence_tells_and_proves(float64):
    model = with_dropout()
    model.compile(keras.optimizers.Adam(0.01), info_nce)
    settings = {"batch_size": 12, "microbatch_size": 5}
    x, y = pairs(36)
    report = check_equivalence(model, x, y, **settings, loss_over="microbatch")
    assert report.verdict == "different"
    assert any("set `microbatch_size` instead of" in reason for reason in report.reasons)
    assert "loss_over='microbatch'" in str(report)
    assert report.to_dict()["loss_over"] == "microbatch"
    check_equivalence(model, x, y, **settings).assert_equivalent()
    report = check_equivalence(model, x, y, **settings, accumulation_steps=3, loss_over="batch")
    assert report.verdict == "different"
    assert any("combines several samples" in reason for reason in report.reasons)


@pytest.mark.parametrize("way", [{}, EAGER])
def test_a_model_that_its_first_batch_builds_matches_by_any_loss(way, float64):
    weights = []
    for settings in ({}, {"microbatch_size": 5}):
        model = seeded(lambda: keras.Sequential([layers.Dense(4), layers.Dense(3, "sigmoid")]))
        model = accumulate(model, **settings)
        model.compile("sgd", keras.losses.Dice(), **way)
        model.fit(*dense_data(34, outputs=3), batch_size=12, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert weights[0]
    for split, whole in zip(*weights, strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-10)


class AddsByTheNumber(layers.Layer):
    def call(self, x):
        self.add_loss(ops.sum(x**2) / ops.cast(ops.shape(x)[0], x.dtype))
        return x


def test_a_sum_over_a_known_number_of_samples_is_a_mean(float64):
    """A batch of 16 and parts of 4: numbers that are constants in a graph of a part."""
    weights = []
    for settings in ({}, {"microbatch_size": 4}):
        model = seeded(
            lambda: keras.Sequential([keras.Input((4,)), layers.Dense(3), AddsByTheNumber()])
        )
        start = model.get_weights()
        model = accumulate(model, **settings)
        model.compile("sgd", "mse")
        batches = tf.data.Dataset.from_tensor_slices(dense_data(32, outputs=3))
        model.fit(batches.batch(16, drop_remainder=True), epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert relative_difference(weights[1], weights[0], start) < TOLERANCE[float64]


def softmax_model():
    layers = [keras.Input((4,)), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential(layers)


def scalar_model():
    layers = [keras.Input((4,)), keras.layers.Dense(1), keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Lambda(lambda z: z[:, 0])])


BROADCAST = {  # of Keras, along the samples
    "targets of two more axes": (scalar_model, lambda: "mse", lambda y: y[:, :1, None]),
    "a column of labels": (
        softmax_model,
        lambda: keras.losses.CategoricalGeneralizedCrossEntropy(),  # not in Keras 3.8
        lambda y: np.argmax(y, -1)[:, None],
    ),
}


@pytest.mark.gate_every_case
@pytest.mark.parametrize("name", BROADCAST)
def test_losses_of_keras_that_compare_samples_by_the_shapes_of_targets_match(name, float64):
    make, loss, targets = BROADCAST[name]
    x, y = dense_data(24)
    trained = []
    for settings in ({}, {"microbatch_size": 5}):
        model = seeded(make)
        start = model.get_weights()
        model = accumulate(model, **settings) if settings else model
        model.compile(keras.optimizers.SGD(0.1), loss())
        model.fit(x, targets(y), batch_size=12, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    assert relative_difference(trained[1], trained[0], start) < TOLERANCE[float64]
