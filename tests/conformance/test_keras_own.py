"""Keras's own tests of its trainer, on any backend, with the mixin in every model they make."""

import functools
import re

import pytest
from case import BACKEND
from keras_own import errors_of, names, needs_tests_of_keras

from ga_model import AccumulatingModel

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

pytestmark = needs_tests_of_keras


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
            (3, "auto"): TRAINS.search(name) and i % 2,
            (3, "batch"): TRAINS.search(name) and i % 4 == 0,
            (None, "auto"): False,
        }.items()
    ],
)
def test_keras_passes_its_own_test(name, size, loss_over):
    errors = errors_of(name, functools.partial(mixed, size, loss_over))
    assert not errors, errors[0]
