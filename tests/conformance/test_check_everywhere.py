"""`check_equivalence` on any backend: its verdicts, and the command.

`CASES` has the known truth of each model, and what has to be named as the reason. The models are
those of the conformance suite, of which it shows the truth, and in `MODELS` those for the check.
"""

import functools
import json
import random
import re
import sys

import keras
import losses
import models
import numpy as np
import own_train_steps
import pytest
import zoo
from case import BACKEND, TRIED
from helpers import (
    Applies,
    assert_equal,
    dense_data,
    dense_model,
    in_the_sweep,
    ruled,
    run_python,
    seeded,
    sequential,
    state_of,
)
from keras import layers, ops

from ga_model import AccumulatingModel, accumulate, check_equivalence
from ga_model.cli._main import main

if BACKEND == "tensorflow":
    import tensorflow as tf

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
    "hard mining of sparse rows": lambda: hard_mining(tf.sparse.from_dense),
    "sampling": lambda: of_rows(stack(models.Draws(1.0))),
    "unseeded noise": lambda: of_rows(stack(unseeded())),
    "diverging": lambda: of_rows(stack(), keras.optimizers.SGD(1e30)),
    "nothing trains": lambda: of_rows(stack(models.Centers()), keras.optimizers.SGD(0.0)),
    "noise on frozen layers": noise_on_frozen_layers,
    "noise and statistics": lambda: of_rows(stack(NoiseAndStatistics(1e-3))),
}

WRONG = ruled(keras.Sequential, lambda model, x, y: ops.where(x[0, 0] > 0, 1.0, 3.0))
SUITE = models.CASES | losses.CASES | own_train_steps.CASES
SUITE["a weight that is wrong"] = losses.own("mse", make=losses.of_class(WRONG))
STEPS = {"batch_size": 8, "accumulation_steps": 3}
SIZE = {"batch_size": 20, "microbatch_size": 6}
BOTH = {"batch_size": 12, "microbatch_size": 4, "accumulation_steps": 3}
OVER_A_MICROBATCH = {**SIZE, "loss_over": "microbatch"}

DIFFERS = r"the gradient of \S+ differs.*, however the parts are weighted"
UNSEEDED = "draws random numbers without"
OF_VERDICTS = "Different", "not finite"  # without a reason
CONTRASTIVE, COMBINES = "own loss: contrastive", "a layer that combines samples"
# The model, how it is accumulated, the verdict that is right, and what the reason must name.
CASES = [
    ("adam", BOTH, "equivalent", None),
    *(in_the_sweep("adam", way, "equivalent", None) for way in (STEPS, SIZE, OVER_A_MICROBATCH)),
    *((name, SIZE, "equivalent", None) for name in ("own train_step: root", CONTRASTIVE)),
    (COMBINES, SIZE, "equivalent", "cannot be split into microbatches"),
    ("batch normalization", SIZE, "different", r"layers in training mode: \['batch_normalization"),
    (COMBINES, OVER_A_MICROBATCH, "different", TRIED),
    (CONTRASTIVE, STEPS, "different", f"{TRIED}.*{DIFFERS}"),
    ("a weight that is wrong", SIZE, "different", "must return what the loss is divided by"),
]

# Those of TensorFlow.
OF_STEPS = """dropout; noise and augmentation; recurrent; frozen batch normalization;
an infinite constant; half precision; own train_step: mean;
own train_step: masked mean; own train_step: sum; own train_step: GAN of one state;
embedding with adam; own loss: sum"""
OF_SIZE = """convolution; dropout; transformer; recurrent; mean and sum; embedding with adam;
sample weights by output; regularizers, sum; dice; own train_step: masked mean;
own train_step: multiplier"""

OF_TENSORFLOW = [
    *((name, STEPS, "equivalent", None) for name in re.split(r";\s", OF_STEPS)),
    *((name, SIZE, "equivalent", None) for name in re.split(r";\s", OF_SIZE)),
    ("batch normalization", STEPS, "different", r"\['batch_normalization"),
    (CONTRASTIVE, OVER_A_MICROBATCH, "different", DIFFERS),
    ("dice", OVER_A_MICROBATCH, "different", DIFFERS),
    ("hard mining", STEPS, "different", DIFFERS),
    ("hard mining of sparse rows", STEPS, "different", OF_VERDICTS[0]),
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
    ("diverging", STEPS, "undecided", OF_VERDICTS[1]),
]
if BACKEND == "tensorflow":
    CASES += [in_the_sweep(*case) for case in OF_TENSORFLOW]


def of_the_suite(name):
    case = SUITE[name]
    model = case.make()
    model.compile(**case.compile())
    return model, *case.data(ROWS)


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("name", "settings", "verdict", "reason"), CASES)
def test_the_verdict_is_the_known_truth(name, settings, verdict, reason, record_property):
    model, *data = seeded(MODELS.get(name) or functools.partial(of_the_suite, name))
    report = check_equivalence(model, *data, **settings)
    text = " ".join(str(report).split())
    told = [v for v in report.variables if v.is_comparable]
    record_property("difference", max((v.difference for v in told), default=np.nan))
    record_property("rounding", max((v.rounding for v in told), default=np.nan))
    assert report.verdict == verdict, text
    assert report.equivalent == (verdict == "equivalent")
    assert text.startswith(verdict.capitalize())
    assert re.search(reason or "", text), text
    assert reason or "Why:" not in text
    if reason not in OF_VERDICTS:
        assert bool(report.reasons) == (reason is not None)
        assert re.search(reason or "", " ".join(report.reasons)), text
    if verdict == "equivalent":
        report.assert_equivalent()
    else:
        with pytest.raises(AssertionError, match=verdict.capitalize()):
            report.assert_equivalent()


# What is left as it was.


def with_layers(*parts):
    model = sequential((4,), layers.Dense(6, "tanh"), *parts, layers.Dense(2))
    return compiled(model, metrics=["mae"])


@pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")
def test_dropout_is_shared_and_everything_is_left_as_it_was():
    """Training goes on to the bit."""

    def make():
        return with_layers(layers.BatchNormalization(), layers.Dropout(0.4, seed=1))

    model, undisturbed = seeded(make), seeded(make)
    for each in (model, undisturbed):
        accumulate(each, accumulation_steps=2)
        each.fit(*dense_data(24), batch_size=6, shuffle=False, verbose=0)
    before, attributes, kind = state_of(model), dict(vars(model)), type(model)
    function, numbers = model.train_function, (random.getstate(), np.random.get_state()[1].tolist())
    report = check_equivalence(model, *dense_data(48), batch_size=12, microbatch_size=4)
    name = model.layers[2].name
    assert report.random_layers.shared == [name]
    assert f"these Dropout layers dropped the same units for every sample: {name}" in str(report)
    assert_equal(state_of(model), before)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == numbers
    assert vars(model).keys() == attributes.keys()
    assert (type(model), model.train_function) == (kind, function)
    assert (model.accumulation_steps, model.microbatch_size) == (2, None)
    assert "call" not in vars(model.layers[2])
    for each in (model, undisturbed):
        each.fit(*dense_data(24), batch_size=6, shuffle=False, verbose=0)
    assert_equal(state_of(model), state_of(undisturbed))


@pytest.mark.gate
def test_a_variable_of_a_loss_is_restored_after_each_training():
    model, loss = seeded(dense_model), losses.DividesByItsAverage()
    model.compile("sgd", loss)
    assert check_equivalence(model, *dense_data(24), batch_size=12, microbatch_size=4).equivalent
    assert float(loss.average) == 1.0


def test_a_model_that_is_not_built_is_trained_as_if_it_had_not_been_checked():
    trained = []
    for is_checked in (True, False):
        model = seeded(zoo.LazilyBuilt)
        model.compile("sgd", "mse")
        if is_checked:
            report = check_equivalence(model, *dense_data(24), batch_size=12, microbatch_size=5)
            assert report.equivalent
            assert model.built
        model.fit(*dense_data(24), batch_size=12, shuffle=False, verbose=0)
        trained.append(state_of(model))
    assert_equal(*trained)


@pytest.mark.gate
def test_an_open_window_and_the_settings_are_kept():
    x, y = dense_data(48)
    trained = []
    for is_checked in (True, False):
        model = seeded(lambda: with_layers(layers.Dropout(0.5, seed=1)))
        accumulate(model, accumulation_steps=3)
        for begin in (0, 16, 32):
            model.train_on_batch(x[begin : begin + 16], y[begin : begin + 16])
            assert int(model.optimizer.iterations) == (begin == 32)
            if is_checked and begin == 0:
                report = check_equivalence(model, x, y, batch_size=8)  # by the model's setting
                assert report.accumulation_steps == 3
                assert isinstance(model, AccumulatingModel)
        trained.append(state_of(model))
    assert_equal(*trained)


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


@pytest.mark.gate
def test_the_command_checks_a_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    (tmp_path / "helper_of_mine.py").write_text("UNITS = 8\n")
    script, file = tmp_path / "script_of_mine.py", tmp_path / "report.json"
    script.write_text(SCRIPT)

    def command(function, *more):
        settings = ["--batch-size", "8", "--accumulation-steps", "2", "--updates", "2"]
        return ["check", f"{script}:{function}", *settings, *more]

    printed, errors = run_python("-m", "ga_model", *command("make", "--json", file))
    first, *others = printed.splitlines()
    assert first.startswith("Equivalent: after 2 updates with batch_size=8, acc")
    assert not any("rounding alone" in line for line in others)
    assert json.loads(file.read_text())["equivalent"] is True
    assert main(command("make", "--table")) == 0
    printed = capsys.readouterr().out
    assert "rounding alone" in printed
    assert "1 = as large as the whole change of the variable in training." in printed
    assert main(command("make_normalized")) == 1
    said = capsys.readouterr().out
    assert "Why: BatchNormalization" in said
    assert "rounding alone" in said
    assert "(1 = as large as its whole change)" in " ".join(said.split())
    assert main(command("make_still")) == 3
    assert capsys.readouterr().out.startswith("Undecided")
    status = main(command("make", "--dtype", "float64", "--table"))
    printed = capsys.readouterr()
    if BACKEND == "tensorflow":
        assert errors == ""  # also of what TensorFlow says when it starts
        assert status == 0
        assert set(re.findall(r"(\S+e-\d+) *$", printed.out, re.M)) == {"1.0e-09"}
    else:
        assert status == 2
        assert "KERAS_BACKEND=tensorflow" in printed.err
