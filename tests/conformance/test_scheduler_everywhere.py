"""`AccumulationScheduler`: windows change by epoch and by update, on any backend.

References are trained by plain Keras on whole windows, one `train_on_batch` for each.
"""

import csv

import keras
import pytest
import training
from case import PRECISION
from conftest import set_dtype
from helpers import assert_changed, assert_close, assert_equal, dense_data

from ga_model import AccumulationScheduler

ROWS = 4
SCHEDULES = {"epoch": {0: 1, 1: 3, 3: 2}, "update": {0: 2, 2: 1, 5: 4, 8: 3}}

by_either = pytest.mark.parametrize("by", SCHEDULES)


def compiled(**settings):
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.8)
    return training.compiled(optimizer=keras.optimizers.Adam(rate), **settings)


def fit(model, *callbacks, epochs=5):
    """Train with epochs that end with partial windows and a ragged batch."""
    arguments = {"batch_size": ROWS, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(*dense_data(30), callbacks=list(callbacks), **arguments).history


def steps_at(schedule, index):
    return schedule[max(key for key in schedule if key <= index)]


def train_whole_windows(by, epochs=5):
    """Train plain Keras on one batch per window, and return the model and the windows' rows."""
    x, y = dense_data(30)
    model, windows = compiled(), []
    for epoch in range(epochs):
        begin = 0
        while begin < len(x):
            steps = steps_at(SCHEDULES[by], epoch if by == "epoch" else len(windows))
            end = min(begin + steps * ROWS, len(x))
            model.train_on_batch(x[begin:end], y[begin:end])
            windows.append(end - begin)
            begin = end
    return model, windows


class Windows(keras.callbacks.Callback):
    """Notes the rows of every window, by what `has_updated` says after each batch."""

    def __init__(self):
        super().__init__()
        self.windows, self.waiting = [], 0

    def on_train_batch_end(self, batch, logs=None):
        self.waiting += min(ROWS, 30 - batch * ROWS)
        if self.model.has_updated:
            self.on_epoch_end(None)

    def on_epoch_end(self, epoch, logs=None):
        assert self.model.has_updated
        self.windows += [self.waiting] if self.waiting else []
        self.waiting = 0


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("is_function", [False, True])
@by_either
def test_updates_are_those_of_the_scheduled_windows(by, is_function, size):
    set_dtype(PRECISION)
    reference, expected = train_whole_windows(by)
    assert len(set(expected)) > 3
    model, watch, asked = compiled(microbatch_size=size), Windows(), []
    start = model.get_weights()

    def function(index):
        asked.append(index)
        return steps_at(SCHEDULES[by], index)

    schedule = function if is_function else SCHEDULES[by]
    fit(model, watch, AccumulationScheduler(schedule, by=by))
    assert watch.windows == expected
    assert_changed(reference.get_weights(), start)
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)
    assert_close(model, reference, start)
    if is_function:
        assert sorted(set(asked)) == list(range(5 if by == "epoch" else len(expected)))


@by_either
def test_a_resumed_run_ends_with_the_uninterrupted_runs_weights(by, tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def train(*callbacks):
        model = compiled(accumulation_steps=7)  # which the schedule overrides
        fit(model, AccumulationScheduler(SCHEDULES[by], by=by), *callbacks)
        return model

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    with pytest.raises(KeyboardInterrupt):
        train(backup(), Interrupt())
    resumed, uninterrupted = train(backup()), train()
    assert int(resumed.optimizer.iterations) == int(uninterrupted.optimizer.iterations)
    assert_equal(resumed.get_weights(), uninterrupted.get_weights())


def test_logs_show_the_schedule_where_they_are_asked_to(tmp_path):
    def train(log, *callbacks):
        scheduler = AccumulationScheduler(SCHEDULES["epoch"], log=log)
        return fit(compiled(accumulation_steps=1), scheduler, *callbacks, epochs=4)

    assert "num_updates" not in train(False)
    history = train(True, keras.callbacks.CSVLogger(tmp_path / "log.csv"))
    assert history["accumulation_steps"] == [1, 3, 3, 2]
    assert history["num_updates"] == [8, 11, 14, 18]
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    for name in ("num_updates", "accumulation_steps"):
        assert [int(row[name]) for row in rows] == history[name]


def test_updates_of_several_optimizers_are_those_of_the_busiest():
    """The one that `compile` makes by default may never be applied."""
    model = compiled(accumulation_steps=1)
    model.other_optimizer = keras.optimizers.SGD()
    model.other_optimizer.iterations.assign(25)
    asked = []
    scheduler = AccumulationScheduler(lambda number: asked.append(number) or 1, by="update")
    fit(model, scheduler, epochs=1)
    assert set(asked) == {25}
