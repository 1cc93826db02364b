"""One trace per function: none for tails, epochs, partial windows or a change of the setting."""

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
def test_one_trace_over_epochs_tails_partial_windows_and_settings(style, jit_compile):
    model = make(style, jit_compile=jit_compile)
    for rows, steps in ((34, 3), (24, 3), (34, 2), (30, 5), (34, 4)):
        model.accumulation_steps = steps
        model.fit(dataset(*dense_data(rows)), epochs=2, shuffle=False, verbose=0)
    assert model.traces == 1


def test_plain_training_has_a_function_of_its_own_and_each_is_traced_once():
    model = make("wrap")
    for steps in (1, 3, 1, 2, 1):
        model.accumulation_steps = steps
        model.fit(dataset(*dense_data(34)), epochs=2, shuffle=False, verbose=0)
    assert model.traces == 2


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


def test_unbuilt_models_trace_no_more_often_than_with_plain_keras():
    counts = []
    for wrap in (False, True):
        model = Counting()
        if wrap:
            model = accumulate(model, accumulation_steps=3)
        model.compile("adam", "mse")
        model.fit(dataset(*dense_data(34)), epochs=3, shuffle=False, verbose=0)
        counts.append(model.traces)
    assert counts[1] <= counts[0]
