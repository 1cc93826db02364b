"""`microbatch_size="auto"`: the largest size that fits, and smaller ones where it fails.

What fits is decided by a layer, by the number of rows: on JAX as programs are traced.
"""

import itertools
import re
import warnings
from pathlib import Path

import keras
import limited_memory
import numpy as np
import pytest
import training
from case import BACKEND
from helpers import (
    ROOT,
    assert_close,
    assert_equal,
    dense_data,
    run_python,
    sequential,
    state_of,
    told,
    values_of,
)
from keras import layers, ops
from limited_memory import Memory, limited, out_of_memory

from ga_model.tools import _memory

pytestmark = pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")


def compiled(memory, size="auto", loss="mse", **settings):
    def make():
        first = layers.Dense(6, activation="tanh")
        hidden = [first, layers.BatchNormalization(), layers.Dropout(0.3, seed=1)]
        return sequential((4,), *hidden, limited(memory), layers.Dense(2))

    given = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["mae"], **settings}
    return training.compiled(make, loss, microbatch_size=size, **given)


def fit(model, data, rows=12, **kwargs):
    return model.fit(*data, batch_size=rows, shuffle=False, **{"verbose": 0, **kwargs}).history


@pytest.mark.parametrize("limit", [3, 1, 100])
def test_the_largest_size_that_fits_is_found(limit, capsys):
    model = compiled(memory := Memory(limit))
    fit(model, dense_data(32), rows=16, epochs=2, verbose=2)
    size = min(limit, 16)
    assert model.microbatch_size == size
    assert max(memory.taken) <= 2 * limit
    said = {
        1: "1 sample per microbatch (2 did not fit)",
        3: "3 samples per microbatch (4 did not fit)",
        100: "the full batch of 16 samples fits",
    }[limit]
    assert f'microbatch_size="auto": {said}\n' in capsys.readouterr().out


def test_no_size_is_tried_to_gain_less_than_a_tenth():
    model = compiled(memory := Memory(100))
    fit(model, dense_data(128), rows=128)
    assert model.microbatch_size == 96
    assert sorted(set(memory.taken) - {128}) == [1, 2, 4, 8, 16, 32, 64, 96, 104, 112]


def test_a_terminal_shows_what_is_tried(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    model = compiled(Memory(3))
    fit(model, dense_data(32), rows=16, verbose=2)
    assert "trying 1 sample per microbatch ..." in capsys.readouterr().out


def mean_of_largest(y, y_pred):
    return ops.mean(ops.max(ops.square(y - y_pred), axis=0))


class Fading(keras.losses.Loss):
    """Fades from one loss to another, by calls that it counts in a number and in an array."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.number, self.array = 0, np.zeros(1, "float32")

    def call(self, y, y_pred):
        self.number += 1
        self.array += 1
        share = min(1.0, (self.number + float(self.array[0])) / 20)
        errors = y - y_pred
        return ops.mean((1 - share) * ops.square(errors) + share * ops.abs(errors), axis=-1)


COUNTING = {"loss": Fading, "run_eagerly": True}
SETTINGS = {
    "windows": {"accumulation_steps": 3},
    "a loss that compares samples": {"loss": mean_of_largest},
    "split": {},
    "recomputed": {"loss_over": "batch"},
    "a loss that counts": {**COUNTING, "loss_over": "batch"},
}


@pytest.mark.every_case
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_training_is_that_with_the_size_as_a_number(settings):
    """The search leaves weights, averages, seeds and metrics as they were."""
    models = [compiled(Memory(5), size, **settings) for size in ("auto", 5)]
    logs = [fit(model, dense_data(42), epochs=2) for model in models]
    assert models[0].microbatch_size == 5
    assert_equal(*(values_of(model.variables) for model in models))
    assert logs[0] == logs[1]


def fails_from_now_on(model, memory, monkeypatch):
    """Let the second microbatch from now on fail, and as large ones that come after it."""
    if BACKEND != "jax":
        memory.drop_in(1, 3)
        return
    steps = model._accumulation.steps  # which run programs that know no memory
    run, number = steps.microbatch, itertools.count()

    def microbatch(*args):
        if next(number) == 1:
            raise out_of_memory("less memory than before")
        return run(*args)

    monkeypatch.setattr(steps, "microbatch", microbatch)


REPEATED = [{}, {"accumulation_steps": 3}, {"skip_nonfinite": True}]
if BACKEND != "jax":  # whose programs for full batches run no microbatch
    REPEATED.append({"accumulation_steps": 2, "loss_over": "batch"})
if BACKEND == "torch":  # TensorFlow updates in the same graph, and cannot go back
    REPEATED += [{"loss_over": "batch"}, {**COUNTING, "loss_over": "batch"}]


@(pytest.mark.every_case if BACKEND == "torch" else pytest.mark.gate)
@pytest.mark.parametrize("settings", REPEATED, ids=str)
def test_a_batch_that_does_not_fit_is_repeated_in_smaller_microbatches(settings, monkeypatch):
    """It failed after one of its microbatches, in windows of several batches in the last of one."""
    expected = compiled(Memory(), 5, **settings)
    model = compiled(memory := Memory(5), **settings)

    class Sizes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4 and self.model is model:
                fails_from_now_on(model, memory, monkeypatch)
            elif batch == 4:
                expected.microbatch_size = 3

    data, start = dense_data(84), expected.get_weights()
    expected_logs = fit(expected, data, callbacks=[Sizes()])
    with pytest.warns(UserWarning, match="no longer fits in memory.*retried with 3"):
        logs = fit(model, data, callbacks=[Sizes()])
    assert model.microbatch_size == 3
    assert_close(model, expected, start)
    found = [*state_of(model), *logs.values()]
    for value, other in zip(found, [*state_of(expected), *expected_logs.values()], strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5)


def test_not_even_one_sample_fits():
    model = compiled(memory := Memory(0))
    before = model.get_weights()
    with pytest.raises(RuntimeError, match=r"at least one sample must fit.* Received: "):
        fit(model, dense_data(24))
    assert_equal(model.get_weights(), before)
    memory.limit = 2
    fit(model, dense_data(24))
    assert model.microbatch_size == 2


@pytest.mark.gate
def test_a_size_that_would_take_too_much_is_not_tried(monkeypatch, capsys):
    """Here the sums of the gradients take 176 + 48 bytes, and every row takes 10."""
    memory = Memory()
    monkeypatch.setattr(_memory, "reset_peak_memory", lambda: None)
    monkeypatch.setattr(_memory, "memory_in_use", lambda: 5000)
    monkeypatch.setattr(_memory, "held_memory", lambda: 0)
    monkeypatch.setattr(_memory, "peak_in_use", lambda: 5224 + 10 * (memory.taken or [0])[-1])
    monkeypatch.setattr(_memory, "available_memory", lambda: (224 + 10 * 17 + 5) / 0.9)
    model = compiled(memory)
    fit(model, dense_data(64), rows=64, verbose=2)
    assert model.microbatch_size == 17
    assert re.search(r"17 samples .*\(18 would not fit", capsys.readouterr().out)


@pytest.mark.gate
def test_a_search_leaves_room_in_a_limited_address_space():
    """As `ulimit -v` limits it. TensorFlow ends a process that has none left."""
    script = Path(__file__).with_name("in_limited_address_space.py")
    size = int(run_python(script, PYTHONPATH=str(ROOT))[0].split()[-1])
    assert 1 <= size < 512


@pytest.mark.gate
@pytest.mark.parametrize("error", limited_memory.ERRORS)
def test_failed_allocations_are_known(error):
    model = compiled(Memory())
    assert model._accumulation.backend.out_of_memory(error) is not None


@pytest.mark.gate
def test_a_larger_batch_is_searched_again_only_where_the_batch_was_the_limit():
    x, y = dense_data(60)
    model = compiled(memory := Memory(20))
    for rows, size in [(6, 6), (4, 6), (12, 12), (40, 20), (60, 20)]:
        model.train_on_batch(x[:rows], y[:rows])
        assert model.microbatch_size == size
    memory.limit = 30
    model.microbatch_size = "auto"
    assert model.microbatch_size == "auto"
    model.train_on_batch(x, y)
    assert model.microbatch_size == 30
    model.microbatch_size = None
    assert model.microbatch_size is None


@pytest.mark.gate
@pytest.mark.parametrize("limit", [5, 12])
def test_a_search_warns_only_of_what_is_trained(limit):
    """Of the full batch nothing is told that is told of parts of it."""
    model = compiled(Memory(limit), loss=mean_of_largest, loss_over="microbatch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.train_on_batch(*dense_data(12))
    assert model.microbatch_size == limit
    said = [text for text in told(caught) if "BatchNormalization layers" not in text]
    assert bool(said) == (limit == 5)
    pattern = "compares samples|does not train as the full batch|only if the loss"
    assert all(re.search(pattern, text) for text in said)
