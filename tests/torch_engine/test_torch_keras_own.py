"""On PyTorch, Keras's own tests of its trainer, with the mixin in every model that they make."""

import functools
import re

import pytest
from keras_own import errors_of, names, needs_tests_of_keras
from torch_step import torch  # noqa: F401 (skips this file where Keras runs on something else)

from ga_model import AccumulatingModel

NAMES = names(
    re.compile(
        "jax|_tf|grain|multiprocessing"  # not installed, or left out by Keras
        "|predict_preserve_order|unknown_data"  # make a `tf.data.Dataset`
        "|(?<!non)_jit$"  # `jit_compile=True`, which is refused
    )
)

pytestmark = needs_tests_of_keras


def mixed(size, base):
    class Mixed(AccumulatingModel, base):
        def compile(self, *args, **kwargs):
            if kwargs.get("jit_compile"):
                kwargs["jit_compile"] = False  # True is refused; these tests are of data
            super().compile(*args, microbatch_size=size, **kwargs)

    return Mixed


def test_keras_is_installed_with_its_tests():
    assert len(NAMES) > 70


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore::UserWarning")  # which Keras's tests provoke
@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("name", NAMES)
def test_keras_passes_its_own_test(name, size):
    errors = errors_of(name, functools.partial(mixed, size))
    assert not errors, errors[0]
