"""`AccumulationScheduler`: the size of windows changes by epoch and by update.

References are trained by plain Keras on whole windows, one `train_on_batch` for each.
"""

import csv

import keras
import pytest
import tensorflow as tf
from counting import make
from helpers import TOLERANCE, assert_changed, dense_data, dense_model, relative_difference, seeded

from ga_model import AccumulationScheduler, accumulate

ROWS = 4
BY_EPOCH = {0: 1, 1: 3, 3: 2}
BY_UPDATE = {0: 2, 2: 1, 5: 4, 8: 3}


def make_optimizer():
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.8)
    return keras.optimizers.Adam(rate)


def make_model(**settings):
    model = seeded(dense_model)
    if settings:
        accumulate(model, **settings)
    model.compile(make_optimizer(), "mse")
    return model


def steps_at(schedule, index):
    return schedule[max(key for key in schedule if key <= index)]


def train_whole_windows(x, y, schedule, by, epochs):
    """Train plain Keras on one batch per window, and return the model and the windows' rows."""
    model, windows = make_model(), []
    for epoch in range(epochs):
        begin = 0
        while begin < len(x):
            steps = steps_at(schedule, epoch if by == "epoch" else len(windows))
            end = min(begin + steps * ROWS, len(x))
            model.train_on_batch(x[begin:end], y[begin:end])
            windows.append(end - begin)
            begin = end
    return model, windows


class Windows(keras.callbacks.Callback):
    """Notes the rows of every window, by what `has_updated` says after each batch."""

    def __init__(self, num_rows):
        super().__init__()
        self.windows, self.num_rows, self.waiting = [], num_rows, 0

    def on_train_batch_end(self, batch, logs=None):
        self.waiting += min(ROWS, self.num_rows - batch * ROWS)
        if self.model.has_updated:
            self.windows.append(self.waiting)
            self.waiting = 0

    def on_epoch_end(self, epoch, logs=None):
        assert self.model.has_updated
        if self.waiting:
            self.windows.append(self.waiting)
        self.waiting = 0


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize(("by", "schedule"), [("epoch", BY_EPOCH), ("update", BY_UPDATE)])
def test_updates_are_those_of_the_scheduled_windows(by, schedule, is_function, size, float64):
    x, y = dense_data(30)  # epochs end with partial windows and a ragged batch
    reference, expected = train_whole_windows(x, y, schedule, by, epochs=5)
    assert len(set(expected)) > 3
    model = make_model(microbatch_size=size)
    start = model.get_weights()
    asked = []

    def function(index):
        asked.append(index)
        return steps_at(schedule, index)

    watch = Windows(len(x))
    scheduler = AccumulationScheduler(function if is_function else schedule, by=by)
    model.fit(
        *(x, y),
        batch_size=ROWS,
        epochs=5,
        shuffle=False,
        verbose=0,
        callbacks=[watch, scheduler],
    )
    assert watch.windows == expected
    assert_changed(reference.get_weights(), start)
    assert model.optimizer.iterations == reference.optimizer.iterations
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE["float64"]
    if is_function:
        numbers = range(5) if by == "epoch" else range(len(expected))
        assert sorted(set(asked)) == list(numbers)


def test_a_schedule_traces_nothing_again():
    """Plain Keras's function for windows of one batch, and two for all others."""
    model = make("wrap")
    data = tf.data.Dataset.from_tensor_slices(dense_data(30)).batch(ROWS)
    schedule = {0: 1, 1: 3, 2: 1, 3: 4, 4: 2}
    for by in ("epoch", "update"):
        scheduler = AccumulationScheduler(schedule, by=by)
        model.fit(data, epochs=6, shuffle=False, verbose=0, callbacks=[scheduler])
    assert model.traces == 3


@pytest.mark.gate
@pytest.mark.parametrize(("by", "schedule"), [("epoch", BY_EPOCH), ("update", BY_UPDATE)])
def test_a_resumed_run_ends_with_the_uninterrupted_runs_weights(by, schedule, tmp_path):
    data = dense_data(30)

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def train(*callbacks):
        model = make_model(accumulation_steps=7)  # which the schedule overrides
        scheduler = AccumulationScheduler(schedule, by=by)
        arguments = {"batch_size": ROWS, "epochs": 5, "shuffle": False, "verbose": 0}
        model.fit(*data, callbacks=[scheduler, *callbacks], **arguments)
        return model

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    with pytest.raises(KeyboardInterrupt):
        train(backup(), Interrupt())
    resumed, uninterrupted = train(backup()), train()
    assert resumed.optimizer.iterations == uninterrupted.optimizer.iterations
    for weight, expected in zip(resumed.get_weights(), uninterrupted.get_weights(), strict=True):
        assert (weight == expected).all()


@pytest.mark.gate
def test_logs_show_the_schedule_where_they_are_asked_to(tmp_path):
    def train(log):
        model = make_model(accumulation_steps=1)
        history = model.fit(
            *dense_data(30),
            batch_size=ROWS,
            epochs=4,
            verbose=0,
            callbacks=[
                AccumulationScheduler(BY_EPOCH, log=log),
                keras.callbacks.CSVLogger(tmp_path / "log.csv"),
                keras.callbacks.TensorBoard(tmp_path / "board", write_graph=False),
            ],
        )
        return history.history

    assert "num_updates" not in train(log=False)
    history = train(log=True)
    assert history["accumulation_steps"] == [1, 3, 3, 2]
    assert history["num_updates"] == [8, 11, 14, 18]
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [int(row["num_updates"]) for row in rows] == history["num_updates"]
    assert [int(row["accumulation_steps"]) for row in rows] == history["accumulation_steps"]
    tags = set()
    for path in (tmp_path / "board").rglob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            tags |= {value.tag for value in event.summary.value}
    assert {"epoch_accumulation_steps", "epoch_num_updates"} <= tags


def test_updates_of_several_optimizers_are_those_of_the_busiest():
    """The one that `compile` makes by default may never be applied."""
    model = make_model(accumulation_steps=1)
    model.other_optimizer = keras.optimizers.SGD()
    model.other_optimizer.iterations.assign(5)
    asked = []
    scheduler = AccumulationScheduler(lambda number: asked.append(number) or 1, by="update")
    model.fit(*dense_data(ROWS), batch_size=ROWS, verbose=0, callbacks=[scheduler])
    assert asked == [5]
