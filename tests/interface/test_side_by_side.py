"""Models side by side: in threads and processes, with shared layers, one inside another."""

import concurrent.futures
import multiprocessing
import threading

import keras
import pytest
from conftest import set_dtype
from helpers import assert_close, dense_data, dense_model, run_python, seeded

from ga_model import accumulate

SETTINGS = [{"accumulation_steps": 3}, {"microbatch_size": 2}]
ROWS = 34  # windows of 12: two full ones, and a ragged one
SECONDS = 240  # within which threads and processes have to end


def compiled(model, jit_compile=False):
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit_compile)
    return model


def fit(model, data, epochs=2):
    """Train with updates of 12 rows."""
    rows = 12 // getattr(model, "accumulation_steps", 1)
    model.fit(*data, batch_size=rows, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.gate
@pytest.mark.parametrize("jit_compile", [False, True])
def test_two_models_train_in_two_threads(jit_compile, float64):
    data = [dense_data(ROWS, seed=seed) for seed in (3, 4)]
    references = [compiled(seeded(dense_model)) for _ in data]
    models = [
        compiled(accumulate(seeded(dense_model), **settings), jit_compile) for settings in SETTINGS
    ]
    starts = [model.get_weights() for model in models]
    for reference, d in zip(references, data):
        fit(reference, d, epochs=20)
    barrier = threading.Barrier(2)

    def train(*args):
        barrier.wait(SECONDS)
        fit(*args, epochs=20)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(train, models, data, timeout=SECONDS))
    for trained in zip(models, references, starts, strict=True):
        assert_close(*trained)


@pytest.mark.parametrize("outer", [{}, *SETTINGS], ids=str)
@pytest.mark.parametrize("inner", SETTINGS, ids=str)
def test_a_model_inside_another_trains_by_the_outer_ones_settings(inner, outer, float64):
    def make(inner=None, outer=None):
        part = dense_model(outputs=3)
        if inner:
            part = compiled(accumulate(part, **inner))
        model = keras.Sequential([keras.Input((4,)), part, keras.layers.Dense(2)])
        return compiled(accumulate(model, **outer) if outer else model), part

    data = dense_data(ROWS)
    (model, part), (reference, other) = seeded(lambda: make(inner, outer)), seeded(make)
    compiled(other)
    start, start_of_part = model.get_weights(), part.get_weights()
    for _ in range(2):  # the outer model, then the inner one by itself
        fit(reference, data)
        fit(model, data)
        inner_data = dense_data(ROWS, outputs=3)
        fit(other, inner_data)
        fit(part, inner_data)
    assert_close(model, reference, start)
    assert_close(part, other, start_of_part)


def train_alone(settings):
    """Train in a process of its own as plain Keras does."""
    set_dtype("float64")
    model, reference = (compiled(seeded(dense_model)) for _ in range(2))
    accumulate(model, **settings)
    start = model.get_weights()
    for each in (model, reference):
        fit(each, dense_data(ROWS))
    assert_close(model, reference, start)


def train_in_a_process(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        pool.apply_async(train_alone, SETTINGS[:1]).get(SECONDS)


SCRIPT = """
import sys
sys.path[:0] = "tests", "tests/interface"
import test_side_by_side
test_side_by_side.train_in_a_process({method!r})
"""


@pytest.mark.sweep
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_model_trains_in_a_process_that_another_starts(method):
    """As long as TensorFlow has not run anything before a fork, which it does not survive."""
    run_python("-c", SCRIPT.format(method=method))
