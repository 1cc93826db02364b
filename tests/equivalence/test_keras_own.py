"""Keras's own tests of its trainer, with the mixin in every model that they make.

They are loaded from where Keras is installed; older releases are installed without them.
"""

import functools
import importlib.util
import re
import sys
import types
import unittest
from unittest import mock

import keras
import pytest
from keras.src.backend.tensorflow import trainer as keras_trainer

from ga_model import AccumulatingModel

SPEC = importlib.util.find_spec("keras.src.trainers.trainer_test")
OTHERS = re.compile("jax|torch|grain|multiprocessing")  # not installed, or left out by Keras
TRAINS = re.compile("^(?!test_(evaluate|predict))")

pytestmark = pytest.mark.skipif(SPEC is None, reason="Keras is installed without its tests")


class _With:
    """A module with some of its names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


def load(mix):
    """Load Keras's tests afresh.

    Args:
        mix: function of a model class that returns the one to be used in its place.
    """
    module = importlib.util.module_from_spec(SPEC)
    trainer = mix(keras_trainer.TensorFlowTrainer)
    with (
        mock.patch.dict(sys.modules, jax=types.ModuleType("jax")),  # imported, and not used here
        mock.patch.object(keras_trainer, "TensorFlowTrainer", trainer),
    ):
        SPEC.loader.exec_module(module)
    classes = {"Model": mix(keras.Model), "Sequential": mix(keras.Sequential)}
    module.keras = _With(keras, **classes)
    module.models = _With(keras.models, **classes)
    return module


def mixed(size, loss_over, base):
    class Mixed(AccumulatingModel, base):
        def compile(self, *args, **kwargs):
            super().compile(*args, microbatch_size=size, loss_over=loss_over, **kwargs)

    return Mixed


def errors_of(name, mix):
    """Run one of the tests, and return the tracebacks of its failures."""
    result = unittest.TestResult()
    load(mix).TestTrainer(name).run(result)
    assert result.testsRun == 1
    return [trace for _, trace in (*result.errors, *result.failures)]


def names():
    if SPEC is None:
        return []
    case = load(lambda base: base).TestTrainer
    found = unittest.TestLoader().getTestCaseNames(case)
    return [n for n in found if not (OTHERS.search(n) or is_skipped(getattr(case, n)))]


def is_skipped(test):
    """Return whether Keras leaves the test out with TensorFlow."""
    marks = getattr(test, "pytestmark", [])
    return any(mark.name == "skipif" and mark.args[0] for mark in marks)


def test_keras_is_installed_with_its_tests():
    assert len(names()) > 100


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore::UserWarning")  # which Keras's tests provoke
@pytest.mark.parametrize(
    ("name", "size", "loss_over"),
    [
        pytest.param(name, *way, marks=[] if is_usual else [pytest.mark.sweep])
        for i, name in enumerate(names())
        for way, is_usual in {
            (3, "auto"): TRAINS.search(name) and i % 2,
            (3, "batch"): TRAINS.search(name) and i % 4 == 0,
            (None, "auto"): False,
        }.items()
    ],
)
def test_keras_passes_its_own_test(name, size, loss_over):
    errors = errors_of(name, functools.partial(mixed, size, loss_over))
    keras.config.enable_traceback_filtering()
    assert not errors, errors[0]
