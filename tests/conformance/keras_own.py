"""Keras's own tests of its trainer, to be run with other classes of models.

They are loaded from where Keras is installed; older releases are installed without them.
"""

import importlib.util
import sys
import types
import unittest
from unittest import mock

import keras
import pytest

SPEC = importlib.util.find_spec("keras.src.trainers.trainer_test")
_BACKEND = keras.backend.backend()
_TRAINERS = {"tensorflow": "TensorFlowTrainer", "torch": "TorchTrainer", "jax": "JAXTrainer"}
_TRAINER = _TRAINERS[_BACKEND]
_OTHERS = {} if _BACKEND == "jax" else {"jax": types.ModuleType("jax")}  # imported, and not used

needs_tests_of_keras = pytest.mark.skipif(
    SPEC is None, reason="Keras is installed without its tests"
)


class _With:
    """A module with some of its names replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


def _load(mix):
    """Load Keras's tests afresh.

    Args:
        mix: function of a model class that returns the one to be used in its place.
    """
    module = importlib.util.module_from_spec(SPEC)
    trainers = importlib.import_module(f"keras.src.backend.{_BACKEND}.trainer")
    with (
        mock.patch.dict(sys.modules, _OTHERS),
        mock.patch.object(trainers, _TRAINER, mix(getattr(trainers, _TRAINER))),
    ):
        SPEC.loader.exec_module(module)
    classes = {"Model": mix(keras.Model), "Sequential": mix(keras.Sequential)}
    module.keras = _With(keras, **classes)
    module.models = _With(keras.models, **classes)
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
