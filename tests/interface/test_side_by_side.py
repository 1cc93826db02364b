"""Models side by side: in threads and processes, with shared layers, one inside another."""

import concurrent.futures
import multiprocessing
import threading

import keras
import pytest
from conftest import set_dtype
from helpers import TOLERANCE, dense_data, dense_model, relative_difference, run_python, seeded

from ga_model import accumulate

SETTINGS = [{"accumulation_steps": 3}, {"microbatch_size": 2}]
ROWS = 34  # windows of 12: two full ones, and a ragged one
SECONDS = 240  # within which threads and processes have to end


def compiled(model, jit_compile=False):
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit_compile)
    return model


def fit(model, data, settings=None, epochs=2):
    """Train with updates of 12 rows."""
    rows = 12 // (settings or {}).get("accumulation_steps", 1)
    model.fit(*data, batch_size=rows, epochs=epochs, shuffle=False, verbose=0)


def difference(models, references, starts):
    return max(
        relative_difference(m.get_weights(), r.get_weights(), start)
        for m, r, start in zip(models, references, starts, strict=True)
    )


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
        list(pool.map(train, models, data, SETTINGS, timeout=SECONDS))
    assert difference(models, references, starts) <= TOLERANCE[float64]


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
    starts = [model.get_weights(), part.get_weights()]
    for _ in range(2):  # the outer model, then the inner one by itself
        fit(reference, data)
        fit(model, data, outer)
        inner_data = dense_data(ROWS, outputs=3)
        fit(other, inner_data)
        fit(part, inner_data, inner)
    assert difference([model, part], [reference, other], starts) <= TOLERANCE[float64]


def train_alone(settings):
    """Train in a process of its own, and return how far from plain Keras it ends."""
    set_dtype("float64")
    model, reference = (compiled(seeded(dense_model)) for _ in range(2))
    accumulate(model, **settings)
    start = model.get_weights()
    fit(model, dense_data(ROWS), settings)
    fit(reference, dense_data(ROWS))
    return difference([model], [reference], [start])


def difference_in_a_process(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply_async(train_alone, SETTINGS[:1]).get(SECONDS)


SCRIPT = """
import sys
sys.path[:0] = "tests", "tests/interface"
import test_side_by_side as tests
difference = tests.difference_in_a_process({method!r})
assert difference <= tests.TOLERANCE["float64"], difference
"""


@pytest.mark.sweep
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_model_trains_in_a_process_that_another_starts(method):
    """As long as TensorFlow has not run anything before a fork, which it does not survive."""
    run_python("-c", SCRIPT.format(method=method))
