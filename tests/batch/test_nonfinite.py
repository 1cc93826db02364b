"""NaN and Inf: what they do by default, and that `skip_nonfinite` leaves no trace of them.

The reference is trained on the rows of the microbatches that are finite, and on nothing else.
"""

import keras
import numpy as np
import pytest
from helpers import assert_close, assert_equal, dense_data, files_told, seeded

from ga_model import accumulate

WINDOW = 12  # rows
WAYS = {  # settings, rows per batch, rows per microbatch
    "windows of batches": ({"accumulation_steps": 3}, 4, 4),
    "split batches": ({"microbatch_size": 4}, 12, 4),
    "windows of split batches": ({"accumulation_steps": 3, "microbatch_size": 2}, 4, 2),
}
RUNS = {"graph": {}, "eager": {"run_eagerly": True}, "jit": {"jit_compile": True}}


def make(**kwargs):
    hidden = keras.layers.Dense(6, activation="tanh", **kwargs)
    return keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(2)])


def regularized():
    return make(kernel_regularizer=keras.regularizers.L2(0.1))


def make_with_state():
    layers = keras.layers
    return keras.Sequential([make(), layers.BatchNormalization(), layers.Dropout(0.5)])


def compiled(model, loss="mse", **arguments):
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(optimizer, loss, metrics=["mae", keras.metrics.R2Score()], **arguments)
    return model


def bad_data(rows, microbatch, bad, value=np.nan):
    """Return data with a value that is not finite in the microbatches `bad`, and the rows kept."""
    x, y = dense_data(rows)
    for i in bad:
        x[i * microbatch, 0] = value
    return x, y, [row for row in range(rows) if row // microbatch not in bad]


def test_by_default_one_bad_microbatch_spoils_the_weights_as_in_the_big_batch():
    x, y, _ = bad_data(24, 4, bad=[1], value=np.inf)
    for settings, rows in ({}, 12), ({"accumulation_steps": 3}, 4), ({"microbatch_size": 4}, 12):
        model = compiled(accumulate(seeded(make), **settings))
        model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
        assert np.isnan(model.get_weights()[0]).any()
        assert model.num_skipped_microbatches == 0


# The first microbatches of a window, all of one window, one of the last.
CASES = [
    ("windows of split batches", [0, 1], "sum_over_batch_size", "graph"),
    ("windows of batches", [0, 1, 2], "sum_over_batch_size", "graph"),
    ("split batches", [0, 1, 2], "sum_over_batch_size", "graph"),
    ("windows of batches", [0], "sum", "graph"),
    ("split batches", [0], "sum", "jit"),
    ("split batches", [0], "sum", "eager"),
    ("windows of batches", [1], "sum_over_batch_size", "jit"),
    ("windows of split batches", [4], "sum_over_batch_size", "graph"),
]


@pytest.mark.filterwarnings("ignore:Microbatches of:UserWarning")
@pytest.mark.parametrize(("way", "bad", "reduction", "run"), CASES, ids=str)
def test_the_windows_mean_is_that_of_the_rest(way, bad, reduction, run, float64):
    settings, rows, microbatch = WAYS[way]
    x, y, keep = bad_data(34, microbatch, bad)
    loss = keras.losses.MeanSquaredError(reduction)
    made = regularized if reduction == "sum" else make  # which counts once
    model = compiled(accumulate(seeded(made), skip_nonfinite=True, **settings), loss, **RUNS[run])
    start = model.get_weights()
    logs = model.fit(x, y, batch_size=rows, shuffle=False, verbose=0).history

    reference = compiled(seeded(made), loss)
    windows = [[row for row in keep if row // WINDOW == window] for window in range(3)]
    batches = ((x[window], y[window]) for window in windows if window)
    num_windows = sum(map(bool, windows))
    expected = reference.fit(batches, steps_per_epoch=num_windows, shuffle=False, verbose=0).history
    assert_close(model, reference, start)
    assert model.optimizer.iterations == reference.optimizer.iterations
    assert model.num_skipped_microbatches == len(bad)
    names = ["mae", "r2_score"]
    if reduction != "sum" or "accumulation_steps" not in settings:
        names.append("loss")
    for name in names:
        np.testing.assert_allclose(logs[name], expected[name], rtol=1e-12, err_msg=name)


@pytest.mark.filterwarnings("ignore:BatchNormalization layers in training:UserWarning")
@pytest.mark.filterwarnings("ignore:Microbatches of:UserWarning")
@pytest.mark.parametrize("run", RUNS)
def test_running_statistics_and_random_state_are_as_if_the_microbatch_had_not_been(run, float64):
    x, y, keep = bad_data(24, 4, bad=[1])
    trained = []
    for skip, windows in ((True, [range(12), range(12, 24)]), (False, [keep[:8], keep[8:]])):
        model = accumulate(seeded(make_with_state), accumulation_steps=3, skip_nonfinite=skip)
        compiled(model, **RUNS[run])
        for window in windows:
            model.accumulation_steps = len(window) // 4
            for first in range(0, len(window), 4):
                part = list(window[first : first + 4])
                model.train_on_batch(x[part], y[part])
        trained.append([*model.get_weights(), *(v.numpy() for v in model.metrics_variables)])
    assert_equal(*trained)


def test_terms_that_average_over_different_things_are_named():
    inputs = keras.Input((4,))
    outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")]
    model = accumulate(keras.Model(inputs, outputs), microbatch_size=4, skip_nonfinite=True)
    model.compile("sgd", [keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError("sum")])
    x, y = dense_data(12)
    with pytest.warns(UserWarning, match="The terms of .* loss"):
        model.train_on_batch(x, [y[:, :1], y[:, 1:]])


def test_a_batch_without_weight_makes_the_update_that_it_makes_without_the_setting():
    x, y = dense_data(12)
    updates = []
    for skip in (False, True):
        model = accumulate(seeded(make), microbatch_size=4, skip_nonfinite=skip)
        loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
        compiled(model, loss).fit(x, y, sample_weight=np.zeros(12), verbose=0, batch_size=12)
        updates.append((int(model.optimizer.iterations), model.num_skipped_microbatches))
    assert updates == [(1, 0)] * 2


def test_what_was_left_out_is_reported_once_and_counted_from_compile_on():
    x, y, _ = bad_data(24, 4, bad=[1, 2])
    model = compiled(accumulate(make(), accumulation_steps=3, skip_nonfinite=True))
    with pytest.warns(UserWarning, match="NaN or Inf in their gradients") as caught:
        model.fit(x, y, batch_size=4, epochs=3, verbose=0, shuffle=False)
    assert files_told(caught) == [__file__]
    assert model.num_skipped_microbatches == 6
    compiled(model)
    assert model.num_skipped_microbatches == 0
