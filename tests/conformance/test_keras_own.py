"""Keras's own tests of its trainer, on any backend, with the mixin in every model they make.

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
from case import BACKEND

from ga_model import AccumulatingModel

SPEC = importlib.util.find_spec("keras.src.trainers.trainer_test")
_TRAINERS = {"tensorflow": "TensorFlowTrainer", "torch": "TorchTrainer", "jax": "JAXTrainer"}
_TRAINER = _TRAINERS[BACKEND]
_OTHERS = {} if BACKEND == "jax" else {"jax": types.ModuleType("jax")}  # imported, and not used

pytestmark = pytest.mark.skipif(SPEC is None, reason="Keras is installed without its tests")


def _load(mix):
    """Load Keras's tests afresh, with what a function makes of each model class in its place."""
    module = importlib.util.module_from_spec(SPEC)
    trainers = importlib.import_module(f"keras.src.backend.{BACKEND}.trainer")
    with (
        mock.patch.dict(sys.modules, _OTHERS),
        mock.patch.object(trainers, _TRAINER, mix(getattr(trainers, _TRAINER))),
    ):
        SPEC.loader.exec_module(module)
    classes = {"Model": mix(keras.Model), "Sequential": mix(keras.Sequential)}
    module.keras = types.SimpleNamespace(**{**vars(keras), **classes})
    module.models = types.SimpleNamespace(**{**vars(keras.models), **classes})
    return module


def errors_of(name, mix):
    """Run one of the tests, and return the tracebacks of its failures."""
    result = unittest.TestResult()
    _load(mix).TestTrainer(name).run(result)
    keras.config.enable_traceback_filtering()
    assert result.testsRun == 1
    return [trace for _, trace in (*result.errors, *result.failures)]


def names(left_out):
    """Return the names of the tests but for those that a regular expression finds."""
    if SPEC is None:
        return []
    case = _load(lambda base: base).TestTrainer
    found = unittest.TestLoader().getTestCaseNames(case)
    return [n for n in found if not (left_out.search(n) or _is_skipped(getattr(case, n)))]


def _is_skipped(test):
    """Return whether Keras leaves the test out with this backend."""
    marks = getattr(test, "pytestmark", [])
    return any(mark.name == "skipif" and mark.args[0] for mark in marks)


# What is not installed or left out by Keras, what makes a `tf.data.Dataset`, and on PyTorch
# `jit_compile=True`, which is refused.
WITHOUT_TENSORFLOW = "_tf|grain|multiprocessing|predict_preserve_order|unknown_data"
LEFT_OUT = {
    "tensorflow": "jax|torch|grain|multiprocessing",
    "torch": f"jax|(?<!non)_jit$|{WITHOUT_TENSORFLOW}",
    "jax": f"torch|{WITHOUT_TENSORFLOW}",
}
NAMES = names(re.compile(LEFT_OUT[BACKEND]))
TRAINS = re.compile("^(?!test_(evaluate|predict))")


def mixed(size, loss_over, base):
    class Mixed(AccumulatingModel, base):
        def compile(self, *args, **kwargs):
            if BACKEND == "torch" and kwargs.get("jit_compile"):
                kwargs["jit_compile"] = False  # True is refused; these tests are of data
            super().compile(*args, microbatch_size=size, loss_over=loss_over, **kwargs)

    return Mixed


def test_keras_is_installed_with_its_tests():
    assert len(NAMES) > 70


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore::UserWarning")  # which Keras's tests provoke
@pytest.mark.parametrize(
    ("name", "size", "loss_over"),
    [
        pytest.param(name, *way, marks=[] if is_usual else [pytest.mark.sweep])
        for i, name in enumerate(NAMES)
        for way, is_usual in {
            (3, "auto"): TRAINS.search(name) and (i % 2 or "custom" in name),
            (3, "batch"): TRAINS.search(name) and i % 4 == 0,
            (None, "auto"): False,
        }.items()
    ],
)
def test_keras_passes_its_own_test(name, size, loss_over):
    errors = errors_of(name, functools.partial(mixed, size, loss_over))
    assert not errors, errors[0]
