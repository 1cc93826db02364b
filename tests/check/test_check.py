"""`check_equivalence` on models of which it is known whether they decompose.

`CASES` has the known truth beside each model, and what has to be named as the reason.
"""

import json
import random
import re
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import dense_data, scope, seeded, set_random_seed, told
from keras import layers, ops

from ga_model import AccumulatingModel, accumulate, check_equivalence
from ga_model.check._equivalence_report import VariableDifference
from ga_model.cli._cli import main

ROWS = 58  # of which the third window is partial, and its last batch or microbatch ragged


def numbers(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return values.astype(keras.config.floatx())


def ids(*shape):
    return np.random.default_rng(1).integers(0, 9, size=shape).astype("int32")


def of_rows(features=6, outputs=2):
    return numbers(ROWS, features), numbers(ROWS, outputs, seed=1)


def stack(*middle, features=6, outputs=2):
    hidden = layers.Dense(12, activation="relu")
    return keras.Sequential(
        [keras.Input((features,)), hidden, *middle, layers.Dense(outputs, name="head")]
    )


def compiled(model, optimizer="adam", loss="mse", **arguments):
    model.compile(optimizer, loss, **arguments)
    return model


# Models that decompose.


def dense():
    return compiled(stack()), *of_rows()


def convolution():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.GroupNormalization(2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2),
        ]
    )
    return compiled(model), numbers(ROWS, 8, 8, 2), numbers(ROWS, 2)


def dropout():
    return compiled(
        stack(layers.Dropout(0.5), layers.Dropout(0.3, noise_shape=(None, 1)))
    ), *of_rows()


def noise_and_augmentation():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.RandomFlip(),
            layers.GaussianNoise(0.5),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.SpatialDropout2D(0.5),
            layers.Flatten(),
            layers.AlphaDropout(0.2),
            layers.Dense(2),
        ]
    )
    return compiled(model), numbers(ROWS, 8, 8, 2), numbers(ROWS, 2)


def transformer():
    """With a key bias, whose gradient is zero in exact arithmetic, and with dropout."""
    tokens = keras.Input((5,), dtype="int32")
    h = layers.Embedding(9, 8)(tokens)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 4, dropout=0.2)(h, h))
    h = layers.Dropout(0.2)(layers.Dense(8, activation="gelu")(h)) + h
    model = keras.Model(tokens, layers.Dense(9)(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(model, loss=loss), ids(ROWS, 5), ids(ROWS, 5)


def recurrent():
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2, return_sequences=True),
            layers.Dense(2),
        ]
    )
    tokens = ids(ROWS, 5)
    tokens[np.arange(5) > (np.arange(ROWS) // 5 % 5)[:, None]] = 0  # uneven over microbatches
    return compiled(model, "sgd"), tokens, numbers(ROWS, 5, 2)


def two_outputs():
    inputs = keras.Input((6,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    outputs = {"a": layers.Dense(2, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)}
    model = keras.Model(inputs, outputs)
    targets = {"a": numbers(ROWS, 2), "b": numbers(ROWS, 1)}
    weights = {"a": np.ones(ROWS), "b": np.arange(ROWS) % 3}
    loss = {"a": "mse", "b": keras.losses.MeanSquaredError("mean_with_sample_weight")}
    return compiled(model, loss=loss), numbers(ROWS, 6), targets, weights


def summed_and_regularized():
    model = stack(layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2"))
    loss = keras.losses.MeanSquaredError("sum")
    return compiled(model, keras.optimizers.SGD(1e-3), loss), *of_rows()


def frozen_batch_normalization():
    normalization = layers.BatchNormalization()
    normalization.trainable = False
    return compiled(stack(normalization)), *of_rows()


class Masks(layers.Layer):
    """Has a weight that is infinite and never changes, as masks of attention may be."""

    def build(self, shape):
        self.mask = self.add_weight(shape=(2,), initializer="zeros", trainable=False)
        self.mask.assign([0.0, -np.inf])

    def call(self, inputs):
        return inputs + ops.exp(self.mask)


def infinite_constant():
    return compiled(stack(layers.Dense(2), Masks())), *of_rows()


def half_precision():
    with_policy = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(64, activation="tanh", dtype="mixed_float16"),
            layers.Dense(2, dtype="mixed_float16"),
        ]
    )
    return compiled(with_policy, keras.optimizers.SGD(0.1)), *of_rows()


class OwnStep(keras.Model):
    """Unbuilt, with a `train_step` of its own."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.head = layers.Dense(2)

    def call(self, inputs):
        return self.head(self.hidden(inputs))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.loss_of(self(x, training=True), y))
        gradients = self.work_over(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def loss_of(self, y_pred, y):
        return tf.square(y_pred - y)

    def work_over(self, gradients):
        return gradients


def own_step():
    return compiled(OwnStep()), *of_rows()


class TwoOptimizers(keras.Model):
    """A generator and a critic. Both gradients are taken before either is applied, or not."""

    def __init__(self, in_turn):
        super().__init__()
        self.generator, self.critic = stack(outputs=6), stack(outputs=1)
        self.in_turn = in_turn

    def compile(self):
        super().compile()
        self.generator_optimizer = keras.optimizers.Adam(0.01)
        self.critic_optimizer = keras.optimizers.RMSprop(0.01)

    def train_step(self, data):
        noise, real = data

        def apply(optimizer, loss, tape, network):
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

        with tf.GradientTape() as tape:
            difference = self.critic(self.generator(noise)) - self.critic(real)
            critic_loss = tf.reduce_mean(tf.square(difference + 1))
        if self.in_turn:
            apply(self.critic_optimizer, critic_loss, tape, self.critic)
        with tf.GradientTape() as generator_tape:
            generator_loss = -tf.reduce_mean(self.critic(self.generator(noise)))
        if not self.in_turn:
            apply(self.critic_optimizer, critic_loss, tape, self.critic)
        apply(self.generator_optimizer, generator_loss, generator_tape, self.generator)
        return {"loss": critic_loss}


def two_optimizers(in_turn=False):
    model = TwoOptimizers(in_turn)
    model.compile()
    return model, numbers(ROWS, 6), numbers(ROWS, 6, seed=1)


# Models that do not.


def batch_normalization():
    return compiled(stack(layers.BatchNormalization())), *of_rows()


def contrastive():
    def loss(y_true, y_pred):
        scores = ops.matmul(y_pred, ops.transpose(y_pred))
        return keras.losses.sparse_categorical_crossentropy(
            ops.arange(ops.shape(scores)[0]), scores, from_logits=True
        )

    return compiled(stack(outputs=4), loss=loss), *of_rows(outputs=4)


def dice():
    model = stack(layers.Dense(2, activation="sigmoid"))
    return compiled(model, loss="dice"), numbers(ROWS, 6), ids(ROWS, 2) % 2


def sum_as_one_number():
    def loss(y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred))

    return compiled(stack(), keras.optimizers.SGD(1e-3), loss), *of_rows()


def hard_mining():
    """The loss of the hardest rows, behind a softmax that Keras's losses see through."""

    def loss(y_true, y_pred):
        losses = keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred)
        return ops.mean(ops.top_k(losses, 2)[0])

    return compiled(stack(layers.Softmax()), loss=loss), numbers(ROWS, 6), ids(ROWS, 1) % 2


def hard_mining_of_sparse_rows():
    model, x, y = hard_mining()
    return model, tf.sparse.from_dense(x), y


class BatchStatistics(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


def layer_that_compares_rows():
    return compiled(stack(BatchStatistics())), *of_rows()


class OwnMean(OwnStep):
    """Averages over the rows that `y` marks."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            marked = tf.cast(y[:, :1] > 0.5, y.dtype)
            losses = self.loss_of(self(x, training=True), y) * marked
            loss = tf.reduce_sum(losses) / tf.maximum(tf.reduce_sum(marked), 1.0)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def mean_of_ones_own():
    return compiled(OwnMean()), *of_rows()


class OwnSum(OwnStep):
    def loss_of(self, y_pred, y):
        return tf.reduce_sum(tf.square(y_pred - y))


class OwnRoot(OwnStep):
    def loss_of(self, y_pred, y):
        return tf.sqrt(tf.reduce_mean(tf.square(y_pred - y)))


class OwnClipping(OwnStep):
    def work_over(self, gradients):
        return tf.clip_by_global_norm(gradients, 0.1)[0]


class OwnAverage(OwnStep):
    """Keeps an average of its head's bias, as teachers are kept."""

    def build(self, shape):
        self.average = self.add_weight(shape=(2,), trainable=False, name="average")

    def work_over(self, gradients):
        self.average.assign(0.9 * self.average + 0.1 * self.head.bias)
        return gradients

    def loss_of(self, y_pred, y):
        return tf.square(y_pred + self.average - y)


def step(kind):
    def make():
        return compiled(kind(), keras.optimizers.SGD(1e-3)), *of_rows()

    make.__name__ = kind.__name__
    return make


def positions():
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(900, 3)(tokens) + Positions(900, 3)(tokens)
    model = keras.Model(tokens, layers.Dense(2)(layers.Dense(3, activation="tanh")(x)))
    return compiled(model), ids(ROWS, 5), numbers(ROWS, 5, 2)


class Positions(layers.Embedding):
    def call(self, tokens):
        return super().call(ops.arange(ops.shape(tokens)[1]))


class RowsAgainstRows(keras.Model):
    """Scores every row against every other, as models of pairs of images and texts do."""

    def __init__(self):
        super().__init__()
        self.left, self.right = layers.Dense(4), layers.Dense(4)

    def call(self, inputs):
        scores = ops.matmul(self.left(inputs), ops.transpose(self.right(inputs)))
        return ops.log_softmax(scores)


def scores_of_pairs():
    def loss(y_true, y_pred):
        return -ops.diagonal(y_pred)

    return compiled(RowsAgainstRows(), loss=loss), *of_rows()


class WrongRule(AccumulatingModel, keras.Model):
    """Counts all microbatches alike, as dividing by `accumulation_steps` does."""

    def microbatch_weight(self, x, y=None, sample_weight=None):
        return 1.0


def equal_weights():
    inputs = keras.Input((6,))
    model = WrongRule(inputs, layers.Dense(2)(inputs))
    return compiled(model, "sgd"), *of_rows()


def equal_weights_of_embeddings():
    """SGD without clipping has no other way with the rows of equal ids."""
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(9, 4)(inputs))
    model = WrongRule(inputs, layers.Dense(2)(hidden))
    return compiled(model, "sgd"), ids(ROWS, 5), numbers(ROWS, 2)


def embedding_and_adam(num_ids=9):
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(num_ids, 4),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    return compiled(model), ids(ROWS, 5), numbers(ROWS, 2)


def spectral_normalization():
    return compiled(stack(layers.SpectralNormalization(layers.Dense(3)))), *of_rows()


# Models of which it cannot be told.


class Sampling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(0)

    def call(self, inputs):
        return inputs + keras.random.normal(ops.shape(inputs), seed=self.seeds)


def sampling():
    return compiled(stack(Sampling())), *of_rows()


class Unseeded(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)


def unseeded_noise():
    return compiled(stack(Unseeded())), *of_rows()


def diverging():
    model = stack()
    return compiled(model, keras.optimizers.SGD(1e30)), *of_rows()


def nothing_trains():
    return compiled(stack(BatchStatistics()), keras.optimizers.SGD(0.0)), *of_rows()


def noise_on_frozen_layers():
    """The variables that train are all moved by the noise; most of the entries do not train."""
    frozen = layers.Dense(400, trainable=False)
    model = keras.Sequential([keras.Input((6,)), frozen, Unseeded(), layers.Dense(1)])
    return compiled(model), *of_rows(outputs=1)


class NoiseAndStatistics(layers.Layer):
    """A layer of one's own which does more in training than draw numbers."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(0)

    def call(self, inputs, training=False):
        if not training:
            return inputs
        noise = keras.random.normal(ops.shape(inputs), stddev=1e-3, seed=self.seeds)
        return inputs - ops.mean(inputs, axis=0, keepdims=True) + noise


def noise_and_statistics():
    return compiled(stack(NoiseAndStatistics())), *of_rows()


STEPS = {"batch_size": 8, "accumulation_steps": 3}
SIZE = {"batch_size": 20, "microbatch_size": 6}
OVER_A_MICROBATCH = {**SIZE, "loss_over": "microbatch"}

# The model, how it is accumulated, the verdict that is right, and what the reason must name.
CASES = [
    (dense, STEPS, "equivalent", None),
    (dense, SIZE, "equivalent", None),
    (dense, {"batch_size": 10, "accumulation_steps": 2, "microbatch_size": 3}, "equivalent", None),
    (convolution, SIZE, "equivalent", None),
    (dropout, STEPS, "equivalent", None),
    (dropout, SIZE, "equivalent", None),
    (noise_and_augmentation, STEPS, "equivalent", None),
    (transformer, SIZE, "equivalent", None),
    (recurrent, STEPS, "equivalent", None),
    (recurrent, SIZE, "equivalent", None),
    (two_outputs, SIZE, "equivalent", None),
    (summed_and_regularized, SIZE, "equivalent", None),
    (frozen_batch_normalization, STEPS, "equivalent", None),
    (infinite_constant, STEPS, "equivalent", None),
    (half_precision, STEPS, "equivalent", None),
    (own_step, STEPS, "equivalent", None),
    (two_optimizers, STEPS, "equivalent", None),
    (embedding_and_adam, SIZE, "equivalent", None),
    (lambda: embedding_and_adam(1000), STEPS, "equivalent", None),
    (batch_normalization, STEPS, "different", r"\['batch_normalization"),
    (batch_normalization, SIZE, "different", r"\['batch_normalization"),
    (contrastive, STEPS, "different", "loss 'loss' .*'MatMul' in .* combines sev"),
    (scores_of_pairs, STEPS, "different", "combines several samples"),
    (contrastive, OVER_A_MICROBATCH, "different", "combines several samples"),
    (contrastive, SIZE, "equivalent", None),
    (dice, SIZE, "equivalent", None),
    (dice, OVER_A_MICROBATCH, "different", "'RealDiv' in .* is not linear"),
    (hard_mining, STEPS, "different", "combines several samples"),
    (hard_mining_of_sparse_rows, STEPS, "different", "Different"),
    (sum_as_one_number, STEPS, "equivalent", None),
    (layer_that_compares_rows, STEPS, "different", "'Sub' in .* combines several samples"),
    (mean_of_ones_own, STEPS, "equivalent", None),
    (step(OwnSum), STEPS, "equivalent", None),
    (positions, STEPS, "equivalent", None),
    (positions, SIZE, "equivalent", None),
    (step(OwnRoot), STEPS, "different", "'Sqrt' in .* is not linear"),
    (step(OwnRoot), SIZE, "equivalent", None),
    (step(OwnClipping), STEPS, "different", "let the optimizer do it"),
    (
        step(OwnAverage),
        STEPS,
        "different",
        r"it writes to \['own_average/average'\] into .on_update",
    ),
    (step(OwnAverage), SIZE, "equivalent", None),
    (equal_weights, STEPS, "different", "override `microbatch_weight`"),
    (equal_weights_of_embeddings, STEPS, "different", "override `microbatch_weight`"),
    (two_outputs, STEPS, "different", "average over different things"),
    (embedding_and_adam, STEPS, "different", "rows with equal ids"),
    (spectral_normalization, STEPS, "different", r"layers \['spectral_normalization'\] write"),
    (lambda: two_optimizers(in_turn=True), STEPS, "different", "before it applies 'adam'"),
    (sampling, STEPS, "undecided", r"\['sampling"),
    (unseeded_noise, STEPS, "undecided", "draws random numbers without"),
    (nothing_trains, STEPS, "undecided", "changes no weight"),
    (noise_on_frozen_layers, STEPS, "undecided", "draws random numbers without"),
    (noise_and_statistics, STEPS, "undecided", r"\['noise_and_statistics"),
    (diverging, STEPS, "undecided", "not finite"),
]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("make", "settings", "verdict", "reason"), CASES, ids=lambda v: getattr(v, "__name__", None)
)
def test_the_verdict_is_the_known_truth(make, settings, verdict, reason, record_property):
    model, *data = seeded(make)
    report = check_equivalence(model, *data, **settings)
    text = str(report)
    told = [v for v in report.variables if v.is_told]
    record_property("difference", max((v.difference for v in told), default=np.nan))
    record_property("rounding", max((v.rounding for v in told), default=np.nan))
    assert report.verdict == verdict, text
    assert report.equivalent == (verdict == "equivalent")
    assert text.startswith(verdict.capitalize())
    if reason is None:
        report.assert_equivalent()
        assert "Why:" not in text
    else:
        assert re.search(reason, " ".join(text.split())), text
        with pytest.raises(AssertionError, match=verdict.capitalize()):
            report.assert_equivalent()


def state_of(model):
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [v.numpy() for v in variables]


def data():
    return numbers(96, 6), numbers(96, 2, seed=1)


def with_dropout():
    model = stack(layers.Dropout(0.5))
    return compiled(model, "adam", metrics=["mae"])


def test_the_model_is_left_as_it_was():
    """Weights, optimizer, metrics, random state, class, functions: training goes on to the bit."""
    model, undisturbed = seeded(with_dropout), seeded(with_dropout)
    for m in (model, undisturbed):
        m.fit(*data(), batch_size=32, verbose=0)
    keras.utils.set_random_seed(5)
    before, model_class, train_function = state_of(model), type(model), model.train_function
    attributes, globally = set(vars(model)), (random.getstate(), np.random.get_state()[1].copy())
    check_equivalence(model, *data(), batch_size=32, microbatch_size=8)
    assert type(model) is model_class
    assert model.train_function is train_function
    assert set(vars(model)) == attributes
    assert random.getstate() == globally[0]
    np.testing.assert_array_equal(np.random.get_state()[1], globally[1])
    for value, expected in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    for m in (model, undisturbed):
        m.fit(*data(), batch_size=32, shuffle=False, verbose=0)
    for value, expected in zip(state_of(model), state_of(undisturbed), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_an_unbuilt_model_is_trained_as_if_it_had_not_been_checked():
    def trained(is_checked):
        model = compiled(seeded(OwnStep))
        if is_checked:
            check_equivalence(model, *data(), batch_size=32, accumulation_steps=2)
        model.fit(*data(), batch_size=32, shuffle=False, verbose=0)
        return state_of(model)

    for value, expected in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.gate
def test_an_open_window_and_the_settings_are_kept():
    def trained(is_checked):
        model = accumulate(seeded(with_dropout), accumulation_steps=3)
        x, y = data()
        model.train_on_batch(x[:32], y[:32])
        if is_checked:
            report = check_equivalence(model, x, y, batch_size=16)  # with the model's own setting
            assert report.accumulation_steps == 3
            assert isinstance(model, AccumulatingModel)
        model.train_on_batch(x[32:64], y[32:64])
        assert model.optimizer.iterations == 0
        model.train_on_batch(x[64:], y[64:])
        assert model.optimizer.iterations == 1
        return state_of(model)

    for value, expected in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("update", [2, 5, 8])  # of the first, the second and the third training
def test_an_interrupted_check_leaves_the_model_as_it_was(update):
    class Interrupted(keras.optimizers.Adam):
        number = 0

        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)
            self.number += 1
            if self.number == update:
                raise KeyboardInterrupt

    model = compiled(stack(layers.Dropout(0.5)), Interrupted(), run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    before, attributes, model_class = state_of(model), set(vars(model)), type(model)
    with pytest.raises(KeyboardInterrupt):
        check_equivalence(model, *data(), batch_size=32, microbatch_size=8)
    assert model.optimizer.number == update
    assert type(model) is model_class
    assert set(vars(model)) == attributes
    assert "call" not in vars(model.layers[1])
    for value, expected in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(value, expected)


class Counts(layers.Layer):
    """Has a variable that Keras does not know, and draws from everything global."""

    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0, trainable=False)

    def call(self, inputs):
        self.count.assign_add(1)
        zero = 0 * (random.random() + np.random.random())
        return inputs + zero * keras.random.normal(ops.shape(inputs))


def test_variables_and_random_numbers_that_keras_does_not_know_are_put_back():
    model = compiled(seeded(lambda: stack(Counts())))
    model.fit(*data(), verbose=0)
    count = model.layers[1].count.numpy()
    set_random_seed(3)
    keras.random.normal((1,))
    expected = np.array(keras.random.normal((3,)))
    set_random_seed(3)
    keras.random.normal((1,))
    drawn = random.getstate(), np.random.get_state()[1].copy()
    check_equivalence(model, *data(), batch_size=32, accumulation_steps=2)
    assert random.getstate() == drawn[0]
    np.testing.assert_array_equal(np.random.get_state()[1], drawn[1])
    assert model.layers[1].count.numpy() == count
    np.testing.assert_array_equal(np.array(keras.random.normal((3,))), expected)


def test_a_call_of_the_instances_own_stays():
    model = compiled(stack(layers.Dropout(0.5), layers.GaussianNoise(0.1)))
    for layer in model.layers[1:3]:
        layer.call = layer.call
    own = [layer.call for layer in model.layers[1:3]]
    report = check_equivalence(model, *data(), batch_size=32, accumulation_steps=2)
    assert [layer.call for layer in model.layers[1:3]] == own
    assert "these layers ran without their random numbers, as in inference: " in str(report)


@pytest.mark.parametrize("arguments", [{"run_eagerly": True}, {"jit_compile": True}])
def test_models_are_checked_as_they_are_compiled(arguments):
    model = compiled(seeded(lambda: stack(layers.Dropout(0.5))), **arguments)
    check_equivalence(model, *data(), batch_size=32, microbatch_size=8).assert_equivalent()
    model = compiled(seeded(lambda: stack(layers.BatchNormalization())), **arguments)
    report = check_equivalence(model, *data(), batch_size=32, accumulation_steps=2, updates=1)
    assert report.verdict == "different"


@pytest.mark.parametrize("settings", [STEPS, SIZE])
def test_float64_is_held_to_a_closer_tolerance(float64, settings):
    model, x, y = seeded(dropout)
    report = check_equivalence(model, x, y, **settings)
    report.assert_equivalent()
    assert "these Dropout layers dropped the same units for every sample: dropout" in str(report)
    assert all(v.tolerance <= 1e-9 for v in report.variables)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("dtype", "rounding", "largest"),
    [
        ("float64", 0.0, 1e-9),
        ("float32", 0.0, 1e-4),
        ("float16", 0.0, 1e-2),
        ("float32", 5e-4, 5e-3),  # ten times what rounding alone does
        ("int64", 0.0, 0.0),
    ],
)
def test_a_variable_is_equal_up_to_rounding(dtype, rounding, largest):
    def of(difference):
        return VariableDifference("w", dtype, 1, True, difference, rounding)

    assert of(largest).is_equal
    assert of(largest).is_told
    assert not of(1.01 * largest + 1e-12).is_equal
    assert not VariableDifference("w", "float32", 1, True, 0.0, 2e-3).is_told  # by rounding alone


def test_a_model_on_several_replicas_is_refused():
    with scope(2):
        model = compiled(seeded(stack))
    with pytest.raises(NotImplementedError, match="Create it without either"):
        check_equivalence(model, *data(), batch_size=16, accumulation_steps=2)


def test_the_report_in_numbers():
    model = compiled(seeded(lambda: stack(layers.BatchNormalization())))
    report = check_equivalence(model, *data(), batch_size=32, microbatch_size=8, updates=2)
    table = report.to_dict()
    assert json.loads(json.dumps(table, allow_nan=False)) == table
    assert (table["updates"], table["samples"]) == (2, 64)
    assert not table["equivalent"]
    assert table["variables"][0]["path"] == report.worst[0].path
    worst = max(v.difference / v.tolerance for v in report.variables if v.difference)
    assert table["variables"][0]["difference"] / table["variables"][0]["tolerance"] == worst
    assert report.reasons == table["reasons"]


def test_an_optimizer_that_can_not_be_put_back_is_refused():
    model = TwoOptimizers(in_turn=False)
    model.compile()
    model.run_eagerly = True
    with pytest.raises(RuntimeError, match="so optimizers must be built"):
        check_equivalence(model, *of_rows(outputs=6), batch_size=8, accumulation_steps=2)


def test_warnings_of_the_users_own_are_passed_on():
    class Warns(keras.losses.Loss):
        def call(self, y_true, y_pred):
            warnings.warn("of the user's own", stacklevel=2)
            return ops.mean(ops.square(y_true - y_pred), axis=-1)

    model = compiled(stack(layers.BatchNormalization()), loss=Warns())
    with pytest.warns(UserWarning, match="own") as caught:
        check_equivalence(model, *data(), batch_size=32, microbatch_size=8)
    assert set(told(caught)) == {"of the user's own"}


class Counting(keras.Sequential):
    """A step that writes to a variable of its own, once per call."""

    def train_step(self, data):
        self.count.assign_add(1.0)
        return super().train_step(data)


def test_an_eager_model_that_has_trained_is_read_again():
    model = Counting([keras.Input((4,)), layers.Dense(2)])
    model.count = model.add_weight(name="count", initializer="zeros", trainable=False)
    model = accumulate(model, accumulation_steps=2)
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = dense_data(24)
    with pytest.warns(UserWarning, match="counting/count differs"):
        model.fit(x, y, batch_size=4, verbose=0)
    report = check_equivalence(model, x, y, batch_size=4, updates=1)
    assert "count" in report.reasons[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was said is not said again
        model.fit(x, y, batch_size=4, verbose=0)


SCRIPT = """
import keras
import numpy as np
from helper_of_mine import UNITS

def make(normalization=False):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(UNITS, "relu")])
    if normalization:
        model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.Dense(1))
    model.compile("adam", "mse")
    generator = np.random.default_rng(0)
    return model, generator.normal(size=(40, 4)), generator.normal(size=(40, 1))

def make_normalized():
    return make(normalization=True)

def make_still():
    model, x, y = make()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model, x, y
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    (tmp_path / "helper_of_mine.py").write_text("UNITS = 8\n")
    path = tmp_path / "script_of_mine.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_command_checks_a_script(script, tmp_path, capsys):
    settings = ["--batch-size", "8", "--accumulation-steps", "2", "--updates", "2"]
    file = tmp_path / "report.json"
    assert main(["check", f"{script}:make", *settings, "--json", str(file)]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("Equivalent: after 2 updates with batch_size=8, acc")
    assert not any("rounding alone" in line for line in others)
    assert main(["check", f"{script}:make", *settings, "--table"]) == 0
    printed = capsys.readouterr().out
    assert "rounding alone" in printed
    assert "1 = as large as the whole change of the variable in training." in printed
    assert json.loads(file.read_text())["equivalent"] is True
    assert main(["check", f"{script}:make_normalized", *settings]) == 1
    said = capsys.readouterr().out
    assert "Why: BatchNormalization" in said
    assert "rounding alone" in said
    assert "(1 = as large as the whole change of the weights)" in " ".join(said.split())
    assert main(["check", f"{script}:make_still", *settings]) == 3
    assert capsys.readouterr().out.startswith("Undecided")


@pytest.mark.gate
def test_the_command_checks_in_float64(script, capsys):
    settings = ["--batch-size", "8", "--microbatch-size", "4", "--dtype", "float64"]
    assert main(["check", f"{script}:make", *settings, "--table"]) == 0
    tolerances = re.findall(r"(\S+e-\d+) *$", capsys.readouterr().out, re.M)
    assert tolerances
    assert set(tolerances) == {"1.0e-09"}


class KeepingUntracked(keras.Model):
    """Has state that Keras does not track: variables of TensorFlow, and numbers in Python."""

    def __init__(self, outside, optimizer):
        super().__init__()
        self.reached = lambda: (outside, optimizer)
        self.hidden, self.head = layers.Dense(6, activation="tanh"), layers.Dense(2)
        self.scale = tf.Variable(1.0, trainable=False, dtype="float64")
        self.steps_run, self.seen = 0, []

    def build(self, shape):
        self.hidden.build(shape)
        self.head.build((None, 6))

    def call(self, x):
        return self.head(self.hidden(x))

    def train_step(self, data):
        x, y = data
        self.steps_run += 1
        self.seen.append(self.steps_run)
        self.scale.assign_add(0.1)
        outside, optimizer = self.reached()
        outside.assign_add(0.1)
        scale = self.scale * outside
        with tf.GradientTape(persistent=True) as tape:
            loss = scale * ops.mean((self(x) - y) ** 2)
        hidden, head = self.hidden.trainable_variables, self.head.trainable_variables
        self.optimizer.apply(tape.gradient(loss, hidden), hidden)
        optimizer.apply(tape.gradient(loss, head), head)
        return {"loss": loss}


@pytest.mark.every_case
@pytest.mark.parametrize("eager", [True, False])
def test_state_that_keras_does_not_track_is_as_before(eager, float64):
    outside = tf.Variable(1.0, trainable=False, dtype="float64")  # gc.freeze would hide older ones
    optimizer = keras.optimizers.Adam(0.1)
    model = compiled(seeded(lambda: KeepingUntracked(outside, optimizer)), run_eagerly=eager)
    model.fit(*of_rows(), batch_size=8, verbose=0)
    variables = [*optimizer.variables, model.scale, outside]
    before, python = [v.numpy() for v in variables], (model.steps_run, list(model.seen))
    report = check_equivalence(model, *of_rows(), batch_size=16, microbatch_size=4)
    assert report.equivalent
    assert (model.steps_run, list(model.seen)) == python
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)


class DrawingWithoutSeed(layers.Layer):
    def call(self, x):
        return x * (1.0 + 0.3 * keras.random.normal(ops.shape(x)))


@pytest.mark.every_case
@pytest.mark.parametrize("eager", [True, False])
def test_numbers_that_are_drawn_without_a_seed_are_the_reason(eager):
    model = compiled(stack(DrawingWithoutSeed()), run_eagerly=eager)
    report = check_equivalence(model, *of_rows(), batch_size=16, microbatch_size=4)
    assert report.random_layers.left == [model.name]
    assert [text for text in report.reasons if "draw random numbers" in text] == report.reasons
