"""`check_equivalence` off TensorFlow: its verdicts, and that it leaves all as it was."""

import subprocess
import sys

import keras
import pytest
from helpers import dense_data, dense_model, seeded
from keras import layers

from ga_model import EquivalenceReport, check_equivalence

SPLIT, WINDOWS = {"microbatch_size": 4}, {"accumulation_steps": 3}

BY_MICROBATCH = {"microbatch_size": 4, "loss_over": "microbatch"}


def with_layer(*parts, kind=keras.Sequential):
    def make(loss="mse", optimizer="adam"):
        first = layers.Dense(6, activation="tanh")
        model = seeded(lambda: kind([keras.Input((4,)), first, *parts, layers.Dense(2)]))
        model.compile(optimizer, loss, metrics=["mae"])
        return model

    return make


def check(make, settings, **arguments):
    x, y = dense_data(48)
    return check_equivalence(make(**arguments), x, y, batch_size=12, **settings)


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [SPLIT, WINDOWS, {**SPLIT, **WINDOWS}, BY_MICROBATCH], ids=str)
def test_what_adds_up_is_equivalent(settings):
    report = check(with_layer(), settings)
    assert isinstance(report, EquivalenceReport)
    assert (report.verdict, report.reasons) == ("equivalent", [])


def test_a_model_that_is_not_built_is_built():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = seeded(Net)
    model.compile("sgd", "mse")
    report = check_equivalence(model, *dense_data(24), batch_size=12, microbatch_size=5)
    assert report.equivalent
    assert model.built


def test_without_two_microbatches_there_is_nothing_to_compare():
    model = dense_model()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="must have at least two microbatches"):
        check_equivalence(model, *dense_data(24), batch_size=12)


SCRIPT = """
import keras, numpy

def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    x = numpy.random.default_rng(0).normal(size=(48, 4))
    return model, x, x[:, :2]
"""


@pytest.mark.gate
def test_the_command_checks_a_script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    check = ["check", f"{file}:make", "--batch-size", "12", "--microbatch-size", "5"]

    def run(*words):
        command = [sys.executable, "-m", "ga_model", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run(*check)
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "Equivalent"), done.stderr
    refused = run(*check, "--dtype", "float64")
    assert refused.returncode == 2
    assert "KERAS_BACKEND=tensorflow" in refused.stderr
