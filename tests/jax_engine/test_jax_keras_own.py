"""On JAX, Keras's own tests of its trainer, with the mixin in every model that they make."""

import functools
import re

import pytest
from keras_own import errors_of, names, needs_tests_of_keras

from ga_model import AccumulatingModel

NAMES = names(
    re.compile(
        "torch|_tf|grain|multiprocessing"  # not installed, or left out by Keras
        "|predict_preserve_order|unknown_data"  # make a `tf.data.Dataset`
    )
)

pytestmark = needs_tests_of_keras


def mixed(size, base):
    class Mixed(AccumulatingModel, base):
        def compile(self, *args, **kwargs):
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
