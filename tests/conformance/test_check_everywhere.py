"""`check_equivalence` on any backend: its verdicts, and the command."""

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
    assert_equal,
    dense_data,
    dense_model,
    in_the_sweep,
    ruled,
    run_python,
    seeded,
    state_of,
)
from keras import layers, ops

from ga_model import AccumulatingModel, EquivalenceReport, accumulate, check_equivalence
from ga_model.cli._main import main

WRONG = ruled(keras.Sequential, lambda model, x, y: ops.where(x[0, 0] > 0, 1.0, 3.0))
SUITE = models.CASES | losses.CASES | own_train_steps.CASES
SUITE["a weight that is wrong"] = losses.own("mse", make=losses.of_class(WRONG))
SPLIT, WINDOWS = {"microbatch_size": 4}, {"accumulation_steps": 3}
BY_MICROBATCH = {"microbatch_size": 4, "loss_over": "microbatch"}
CONTRASTIVE, COMBINES = "own loss: contrastive", "a layer that combines samples"
# The case, how it is accumulated, the verdict, and what is told if anything is.
REPORTS = [
    ("adam", {**SPLIT, **WINDOWS}, "equivalent", None),
    *(in_the_sweep("adam", way, "equivalent", None) for way in (SPLIT, WINDOWS, BY_MICROBATCH)),
    *((name, SPLIT, "equivalent", None) for name in ("own train_step: root", CONTRASTIVE)),
    (COMBINES, SPLIT, "equivalent", "cannot be split into microbatches"),
    ("batch normalization", SPLIT, "different", "BatchNormalization layers in training mode"),
    (COMBINES, BY_MICROBATCH, "different", TRIED),
    (CONTRASTIVE, WINDOWS, "different", TRIED),
    ("a weight that is wrong", SPLIT, "different", "must return what the loss is divided by"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "settings", "verdict", "words"), REPORTS)
def test_what_differs_is_named_and_what_adds_up_is_equivalent(name, settings, verdict, words):
    case = SUITE[name]
    model = seeded(case.make)
    model.compile(**case.compile())
    report = check_equivalence(model, *case.data(48), batch_size=12, **settings)
    assert isinstance(report, EquivalenceReport)
    assert report.verdict == verdict
    assert bool(report.reasons) == (words is not None)
    for text in (" ".join(report.reasons), str(report)):
        assert re.search(words or "", " ".join(text.split()))


def with_layers(*parts):
    first = layers.Dense(6, activation="tanh")
    model = keras.Sequential([keras.Input((4,)), first, *parts, layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


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
        accumulate(model, **WINDOWS)
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
    assert "(1 = as large as the whole change of the weights)" in " ".join(said.split())
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
