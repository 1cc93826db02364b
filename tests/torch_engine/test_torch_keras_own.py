"""On PyTorch, Keras's own tests of its trainer, with the mixin in every model that they make.

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
from pairs import torch  # noqa: F401 (skips this file where Keras runs on something else)

from ga_model import AccumulatingModel

SPEC = importlib.util.find_spec("keras.src.trainers.trainer_test")
LEFT_OUT = re.compile(
    "jax|_tf|grain|multiprocessing"  # not installed, or left out by Keras
    "|predict_preserve_order"  # makes a `tf.data.Dataset`
    "|(?<!non)_jit$"  # `jit_compile=True`, which is refused
)

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
    from keras.src.backend.torch import trainer as keras_trainer

    module = importlib.util.module_from_spec(SPEC)
    trainer = mix(keras_trainer.TorchTrainer)
    with (
        mock.patch.dict(sys.modules, jax=types.ModuleType("jax")),  # imported, and not used here
        mock.patch.object(keras_trainer, "TorchTrainer", trainer),
    ):
        SPEC.loader.exec_module(module)
    classes = {"Model": mix(keras.Model), "Sequential": mix(keras.Sequential)}
    module.keras = _With(keras, **classes)
    module.models = _With(keras.models, **classes)
    return module


def mixed(size, base):
    class Mixed(AccumulatingModel, base):
        def compile(self, *args, **kwargs):
            if kwargs.get("jit_compile"):
                kwargs["jit_compile"] = False  # True is refused; these tests are of data
            super().compile(*args, microbatch_size=size, **kwargs)

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
    return [n for n in found if not (LEFT_OUT.search(n) or is_skipped(getattr(case, n)))]


def is_skipped(test):
    """Return whether Keras leaves the test out with PyTorch."""
    marks = getattr(test, "pytestmark", [])
    return any(mark.name == "skipif" and mark.args[0] for mark in marks)


def test_keras_is_installed_with_its_tests():
    assert len(names()) > 70


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore::UserWarning")  # which Keras's tests provoke
@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("name", names())
def test_keras_passes_its_own_test(name, size):
    errors = errors_of(name, functools.partial(mixed, size))
    keras.config.enable_traceback_filtering()
    assert not errors, errors[0]
