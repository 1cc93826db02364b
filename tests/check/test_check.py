"""`check_equivalence` on models of which it is known whether they decompose.

`CASES` has the known truth of each model, and what has to be named as the reason. The models are
those of the conformance suite, of which it shows the truth, and in `MODELS` those for the check.
"""

import functools
import json
import re
import warnings

import keras
import losses
import models
import numpy as np
import own_train_steps
import pytest
import tensorflow as tf
from helpers import (
    Applies,
    assert_equal,
    dense_data,
    scope,
    seeded,
    sequential,
    state_of,
    told,
    values_of,
)
from keras import layers, ops
from keras.src.backend.common import global_state

from ga_model import accumulate, check_equivalence
from ga_model.check._equivalence_report import VariableDifference

ROWS = 58  # of which the third window is partial, and its last batch or microbatch ragged


def ids(*shape):
    return np.random.default_rng(1).integers(0, 9, size=shape).astype("int32")


def stack(*middle):
    hidden = layers.Dense(12, activation="relu")
    return sequential((6,), hidden, *middle, layers.Dense(2, name="head"))


def compiled(model, optimizer="adam", loss="mse", **arguments):
    model.compile(optimizer, loss, **arguments)
    return model


def of_rows(model, *args):
    """Return a model, compiled, and its data."""
    return compiled(model, *args), *dense_data(ROWS, 6)


# Models that decompose.


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
    lstm = layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2, return_sequences=True)
    inputs, embedding = keras.Input((5,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True)
    model, tokens = keras.Sequential([inputs, embedding, lstm, layers.Dense(2)]), ids(ROWS, 5)
    tokens[np.arange(5) > (np.arange(ROWS) // 5 % 5)[:, None]] = 0  # uneven over microbatches
    return compiled(model, "sgd"), tokens, dense_data(ROWS, outputs=10)[1].reshape(ROWS, 5, 2)


def images():
    parts = [layers.RandomFlip(), layers.GaussianNoise(0.5), layers.Conv2D(4, 3, activation="tanh")]
    parts += [layers.GroupNormalization(2), layers.SpatialDropout2D(0.5), layers.Flatten()]
    model = sequential((8, 8, 2), *parts, layers.AlphaDropout(0.2), layers.Dense(2))
    x, y = dense_data(ROWS, 8 * 8 * 2)
    return compiled(model), x.reshape(ROWS, 8, 8, 2), y


class Masks(layers.Layer):
    """Has a weight that is infinite and never changes, as masks of attention may be."""

    def build(self, shape):
        self.mask = self.add_weight(shape=(2,), initializer="zeros", trainable=False)
        self.mask.assign([0.0, -np.inf])

    def call(self, inputs):
        return inputs + ops.exp(self.mask)


# Models that do not, or of which it cannot be told.


def of_the_hardest(y_true, y_pred):
    """Behind a softmax that Keras's losses see through."""
    losses = keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred)
    return ops.mean(ops.top_k(losses, 2)[0])


def hard_mining(convert=np.asarray):
    model = compiled(stack(layers.Softmax()), loss=of_the_hardest)
    return model, convert(dense_data(ROWS, 6)[0]), ids(ROWS, 1) % 2


class NoiseAndStatistics(models.Draws):
    """A layer of one's own which does more in training than draw numbers."""

    def call(self, inputs, training=False):
        if not training:
            return inputs
        return super().call(inputs - ops.mean(inputs, axis=0, keepdims=True))


def unseeded():
    return Applies(lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype))


def noise_on_frozen_layers():
    """The variables that train are all moved by the noise; most of the entries do not train."""
    frozen = layers.Dense(400, trainable=False)
    return of_rows(sequential((6,), frozen, unseeded(), layers.Dense(2)))


def half_precision():
    parts = (layers.Dense(*args, dtype="mixed_float16") for args in ((64, "tanh"), (2,)))
    return of_rows(sequential((6,), *parts), keras.optimizers.SGD(0.1))


MODELS = {
    "dropout": lambda: of_rows(
        stack(layers.Dropout(0.5), layers.Dropout(0.3, noise_shape=(None, 1)))
    ),
    "noise and augmentation": images,
    "transformer": transformer,
    "recurrent": recurrent,
    "an infinite constant": lambda: of_rows(stack(layers.Dense(2), Masks())),
    "half precision": half_precision,
    "hard mining": hard_mining,
    "hard mining of sparse rows": functools.partial(hard_mining, tf.sparse.from_dense),
    "sampling": lambda: of_rows(stack(models.Draws(1.0))),
    "unseeded noise": lambda: of_rows(stack(unseeded())),
    "diverging": lambda: of_rows(stack(), keras.optimizers.SGD(1e30)),
    "nothing trains": lambda: of_rows(stack(models.Centers()), keras.optimizers.SGD(0.0)),
    "noise on frozen layers": noise_on_frozen_layers,
    "noise and statistics": lambda: of_rows(stack(NoiseAndStatistics(1e-3))),
}

SUITE = models.CASES | losses.CASES | own_train_steps.CASES
STEPS = {"batch_size": 8, "accumulation_steps": 3}
SIZE = {"batch_size": 20, "microbatch_size": 6}
OVER_A_MICROBATCH = {**SIZE, "loss_over": "microbatch"}

DIFFERS = r"the gradient of \S+ differs.*, however the parts are weighted"
UNSEEDED = "draws random numbers without"
OF_STEPS = """adam; dropout; noise and augmentation; recurrent; frozen batch normalization;
an infinite constant; half precision; own train_step: mean;
own train_step: masked mean; own train_step: sum; own train_step: GAN of one state;
embedding with adam; own loss: sum"""
OF_SIZE = """adam; convolution; dropout; transformer; recurrent; mean and sum; embedding with adam;
sample weights by output; regularizers, sum; dice; own train_step: masked mean;
own train_step: multiplier"""

# The model, how it is accumulated, the verdict that is right, and what the reason must name.
CASES = [
    *((name, STEPS, "equivalent", None) for name in re.split(r";\s", OF_STEPS)),
    *((name, SIZE, "equivalent", None) for name in re.split(r";\s", OF_SIZE)),
    ("batch normalization", STEPS, "different", r"\['batch_normalization"),
    ("own loss: contrastive", OVER_A_MICROBATCH, "different", DIFFERS),
    ("dice", OVER_A_MICROBATCH, "different", DIFFERS),
    ("hard mining", STEPS, "different", DIFFERS),
    ("hard mining of sparse rows", STEPS, "different", "Different"),
    ("own train_step: root", STEPS, "different", DIFFERS),
    ("own train_step: gradients clipped by norm", STEPS, "different", DIFFERS),
    ("own train_step: multiplier", STEPS, "different", r"it writes to \[.*\] into .on_update"),
    ("mean and sum", STEPS, "different", "average over different things"),
    ("a layer that writes to its weights", STEPS, "different", r"\['spectral_normalization'\] wri"),
    ("own train_step: GAN", STEPS, "different", DIFFERS),
    ("sampling", STEPS, "undecided", r"\['draws"),
    ("unseeded noise", STEPS, "undecided", UNSEEDED),
    ("nothing trains", STEPS, "undecided", "changes no weight"),
    ("noise on frozen layers", STEPS, "undecided", UNSEEDED),
    ("noise and statistics", STEPS, "undecided", r"\['noise_and_statistics"),
    ("diverging", STEPS, "undecided", "not finite"),
]


def of_the_suite(name):
    case = SUITE[name]
    model = case.make()
    model.compile(**case.compile())
    return model, *case.data(ROWS)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("name", "settings", "verdict", "reason"), CASES)
def test_the_verdict_is_the_known_truth(name, settings, verdict, reason, record_property):
    model, *data = seeded(MODELS.get(name) or functools.partial(of_the_suite, name))
    report = check_equivalence(model, *data, **settings)
    text = str(report)
    told = [v for v in report.variables if v.is_comparable]
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


# What is left as it was.


def data():
    return dense_data(96, 6)


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
    assert_equal(state_of(model), before)


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
    for loss_over in ("microbatch", "batch"):
        settings = {"batch_size": 32, "microbatch_size": 8, "loss_over": loss_over}
        check_equivalence(model, *data(), **settings).assert_equivalent()
    model = compiled(seeded(lambda: stack(layers.BatchNormalization())), **arguments)
    report = check_equivalence(model, *data(), batch_size=32, accumulation_steps=2, updates=1)
    assert report.verdict == "different"


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
    assert of(largest).is_comparable
    assert not of(1.01 * largest + 1e-12).is_equal
    assert not VariableDifference(
        "w", "float32", 1, True, 0.0, 2e-3
    ).is_comparable  # by rounding alone


def test_the_heading_names_the_variable_that_is_nearest_to_its_tolerance():
    model = compiled(seeded(stack))
    report = check_equivalence(model, *data(), batch_size=16, microbatch_size=8, updates=1)
    near = VariableDifference("near", "float32", 1, True, 9e-5, 0.0)
    far = VariableDifference("far", "float32", 1, True, 1e-3, 1e-3)  # of 1e-2
    text = str(report._replace(variables=[far, near]))
    assert "tolerance, near differs most: by 9.0e-05 (1 = as large" in " ".join(text.split())


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
    model, *data = of_the_suite("own train_step: GAN of one state")
    model.run_eagerly = True
    with pytest.raises(RuntimeError, match="so optimizers must be built"):
        check_equivalence(model, *data, batch_size=8, accumulation_steps=2)


def test_warnings_of_the_users_own_are_passed_on():
    class Warns(keras.losses.Loss):
        def call(self, y_true, y_pred):
            warnings.warn("of the user's own", stacklevel=2)
            return ops.mean(ops.square(y_true - y_pred), axis=-1)

    model = compiled(stack(layers.BatchNormalization()), loss=Warns())
    with pytest.warns(UserWarning, match="own") as caught:
        check_equivalence(model, *data(), batch_size=32, microbatch_size=8)
    assert set(told(caught)) == {"of the user's own"}


def test_an_eager_model_that_has_trained_is_read_again():
    """Its step writes to a variable of its own, once per call."""

    class Counting(keras.Sequential):
        def train_step(self, data):
            self.count.assign_add(1.0)
            return super().train_step(data)

    model = Counting([keras.Input((4,)), layers.Dense(2)])
    model.count = model.add_weight(name="count", initializer="zeros", trainable=False)
    model = accumulate(model, accumulation_steps=2)
    model.compile("sgd", "mse", run_eagerly=True)
    x, y = dense_data(24)
    with pytest.warns(UserWarning, match="counting/count differs"):
        model.fit(x, y, batch_size=4, verbose=0)
    report = check_equivalence(model, x, y, batch_size=4, updates=1)
    assert "count" in report.reasons[0]
    model.fit(x, y, batch_size=4, verbose=0)  # what was said is not said again


class KeepingUntracked(keras.Sequential):
    """Has state that Keras does not track: variables of TensorFlow, and numbers in Python."""

    def train_step(self, data):
        x, y = data
        self.steps_run += 1
        self.seen.append(self.steps_run)
        self.scale.assign_add(0.1)
        outside, optimizer = self.reached()
        outside.assign_add(0.1)
        with tf.GradientTape(persistent=True) as tape:
            loss = self.scale * outside * ops.mean((self(x) - y) ** 2)
            if self.run_eagerly:  # else it is of the trace
                loss *= 1.0 + 0.1 * self.steps_run
        hidden, head = (layer.trainable_variables for layer in self.layers)
        self.optimizer.apply(tape.gradient(loss, hidden), hidden)
        optimizer.apply(tape.gradient(loss, head), head)
        return {"loss": loss}


@pytest.mark.every_case
@pytest.mark.parametrize("eager", [True, False])
def test_state_that_keras_does_not_track_is_as_before(eager, float64):
    outside = tf.Variable(1.0, trainable=False, dtype="float64")  # gc.freeze would hide older ones
    optimizer = keras.optimizers.Adam(0.1)
    parts = [keras.Input((6,)), layers.Dense(6, activation="tanh"), layers.Dense(2)]
    model = compiled(seeded(lambda: KeepingUntracked(parts)), run_eagerly=eager)
    model.reached = lambda: (outside, optimizer)
    model.scale = tf.Variable(1.0, trainable=False, dtype="float64")
    model.steps_run, model.seen = 0, []
    model.fit(*data(), batch_size=8, verbose=0)
    variables = [*optimizer.variables, model.scale, outside]
    before, python = values_of(variables), (model.steps_run, list(model.seen))
    report = check_equivalence(model, *data(), batch_size=16, microbatch_size=4)
    assert report.equivalent
    assert (model.steps_run, list(model.seen)) == python
    assert_equal(values_of(variables), before)


def test_numbers_that_are_drawn_without_a_seed_are_the_reason():
    """And those of Keras go on as if nothing had been drawn."""

    draws = Applies(lambda x: x * (1.0 + 0.3 * keras.random.normal(ops.shape(x))))
    model = compiled(stack(draws))
    model.fit(*data(), verbose=0)
    seeds = global_state.get_global_attribute("global_seed_generator").state
    before = seeds.numpy().tolist()
    report = check_equivalence(model, *data(), batch_size=16, microbatch_size=4)
    assert report.random_layers.left == [model.name]
    assert [text for text in report.reasons if "draw random numbers" in text] == report.reasons
    seeds = global_state.get_global_attribute("global_seed_generator").state
    assert seeds.numpy().tolist() == before
