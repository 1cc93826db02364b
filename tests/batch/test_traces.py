"""One trace per function: none for tails, epochs, partial windows or a change of the setting.

A window has two functions where `fit` or `train_on_batch` drives it a batch at a time: one for
batches that are added up, and one for the batch that fills it.
"""

import keras
import pytest
import tensorflow as tf
from counting import Counting, make
from helpers import dense_data

from ga_model import accumulate


def dataset(x, y):
    """Batches whose number of rows is not known when the step is traced."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("style", ["wrap", "subclass"])
def test_two_traces_over_epochs_tails_partial_windows_and_settings(style, jit_compile):
    model = make(style, jit_compile=jit_compile)
    for rows, steps in ((34, 3), (24, 3), (34, 2), (30, 5), (34, 4)):
        model.accumulation_steps = steps
        model.fit(dataset(*dense_data(rows)), epochs=2, shuffle=False, verbose=0)
    assert model.traces == 2


def test_plain_training_has_a_function_of_its_own_and_each_is_traced_once():
    model = make("wrap")
    for steps in (1, 3, 1, 2, 1):
        model.accumulation_steps = steps
        model.fit(dataset(*dense_data(34)), epochs=2, shuffle=False, verbose=0)
    assert model.traces == 3


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_second_function_is_traced_when_the_first_window_is_full(jit_compile):
    model, (x, y) = make("wrap", jit_compile=jit_compile), dense_data(8)
    traces = []
    for _ in range(7):
        model.train_on_batch(x, y)
        traces.append(model.traces)
    assert traces == [1, 1, 2, 2, 2, 2, 2]


def test_batches_that_are_added_up_know_no_optimizer_and_no_update_waits():
    model, (x, y) = make("wrap"), dense_data(8)
    for _ in range(6):
        model.train_on_batch(x, y)
    adds, updates = model.graphs
    state = {v.value.ref() for v in model.optimizer.variables}
    assert not state & {v.ref() for v in adds.variables}
    assert state & {v.ref() for v in updates.variables}
    assert "If" not in {op.type for op in adds.get_operations()}


def test_several_steps_per_execution_have_one_function_that_counts():
    model = make("wrap", steps_per_execution=2)
    model.fit(dataset(*dense_data(34)), epochs=2, shuffle=False, verbose=0)
    assert model.traces == 1


def test_closing_partial_windows_traces_the_update_once(monkeypatch):
    model = make("wrap")
    updates = []
    apply = keras.optimizers.Adam.apply

    def counted(self, *args, **kwargs):
        updates.append(self)
        return apply(self, *args, **kwargs)

    monkeypatch.setattr(keras.optimizers.Adam, "apply", counted)
    for _ in range(3):
        model.fit(dataset(*dense_data(30)), epochs=2, shuffle=False, verbose=0)
    assert len(updates) == 2  # in the step, and where an epoch ends


def test_unbuilt_models_trace_once_more_than_with_plain_keras():
    counts = []
    for wrap in (False, True):
        model = Counting()
        if wrap:
            model = accumulate(model, accumulation_steps=3)
        model.compile("adam", "mse")
        model.fit(dataset(*dense_data(34)), epochs=3, shuffle=False, verbose=0)
        counts.append(model.traces)
    assert counts[1] <= counts[0] + 1  # the function for the batch that fills a window


@pytest.mark.gate
def test_batches_of_a_loop_of_ones_own_count_in_a_window_that_python_counts():
    model, (x, y) = make("wrap"), dense_data(8)
    own = tf.function(lambda: model.train_step((x, y)))
    for _ in range(3):  # the first one traces
        before = int(model.optimizer.iterations)
        model.train_on_batch(x, y)
        own()
        assert int(model.optimizer.iterations) == before
        model.train_on_batch(x, y)
        assert int(model.optimizer.iterations) == before + 1
    for _ in range(2):
        own()
    assert model.optimizer.iterations == 3
    assert not model.has_updated
    model.train_on_batch(x, y)
    assert model.optimizer.iterations == 4
