"""Keras's callbacks, each used as its users do: they see and do what they do with plain Keras.

The reference is plain Keras with the full batch and a callback of its own.
"""

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, assert_changed, dense_data, dense_model, relative_difference, seeded

from ga_model import accumulate

BIG = 12  # rows
WAYS = {
    "accumulation_steps": ({"accumulation_steps": 3}, 4),
    "microbatch_size": ({"microbatch_size": 4}, BIG),
}


@pytest.fixture(params=WAYS)
def way(request):
    """The settings, and the rows per batch."""
    return WAYS[request.param]


def make_optimizer(**arguments):
    return keras.optimizers.Adam(0.05, **arguments)


def train(make_callbacks, settings=None, rows=BIG, epochs=4, data=None, optimizer=make_optimizer):
    """Train a model with or without settings, with validation."""
    x, y = data or dense_data(42)  # with a window that is partial and ragged
    model = seeded(dense_model)
    if settings:
        accumulate(model, **settings)
    model.compile(optimizer(), "mse", metrics=["mae"])
    model.fit(
        *(x[:-12], y[:-12]),
        batch_size=rows,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=(x[-12:], y[-12:]),
        callbacks=make_callbacks(BIG // rows),
    )
    return model


def assert_same(model, reference):
    """Compare weights, the optimizer's clock and all logs."""
    start = seeded(dense_model).get_weights()
    assert_changed(reference.get_weights(), start)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE["float64"]
    assert model.optimizer.iterations == reference.optimizer.iterations
    assert model.history.epoch == reference.history.epoch
    history, expected = model.history.history, reference.history.history
    assert list(history) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-10, err_msg=name)


def worse_at_first(epoch, learning_rate):
    return 0.5 if epoch else 0.05


class Watch(keras.callbacks.Callback):
    """Reads the optimizer and the weights wherever it can."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(("epoch begins", epoch, int(self.model.optimizer.iterations)))

    def on_test_begin(self, logs=None):
        self.seen.append(("validation", int(self.model.optimizer.iterations)))

    def on_epoch_end(self, epoch, logs=None):
        rate = float(self.model.optimizer.learning_rate)
        self.seen.append(("epoch ends", epoch, rate, sorted(logs)))


EVERYDAY = {
    "EarlyStopping": lambda: [
        keras.callbacks.LearningRateScheduler(worse_at_first),
        keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True),
    ],
    "ReduceLROnPlateau": lambda: [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=10.0)
    ],
    "a callback of one's own": lambda: [Watch()],
}


@pytest.mark.parametrize("name", EVERYDAY)
def test_callbacks_that_steer_the_training(name, way, float64):
    callbacks = []

    def make_callbacks(_):
        callbacks.append(EVERYDAY[name]())
        return callbacks[-1]

    model, reference = train(make_callbacks, *way), train(make_callbacks)
    assert_same(model, reference)
    if name == "EarlyStopping":
        assert callbacks[0][1].stopped_epoch == callbacks[1][1].stopped_epoch > 0
        assert callbacks[0][1].best_epoch == callbacks[1][1].best_epoch
    if name == "ReduceLROnPlateau":
        assert model.optimizer.learning_rate.numpy() < 0.05 * 0.3**2
    if name == "a callback of one's own":
        assert callbacks[0][0].seen == callbacks[1][0].seen


def test_lambda_callbacks_read_the_users_optimizer_after_every_batch(way, float64):
    settings, rows = way
    iterations, optimizers = [], []

    def make_callbacks(_):
        return [
            keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: optimizers.append(model.optimizer),
                on_train_batch_end=lambda batch, logs: iterations.append(
                    (batch, int(model.optimizer.iterations))
                ),
            )
        ]

    x, y = dense_data(36)
    model = accumulate(seeded(dense_model), **settings)
    optimizer = make_optimizer()
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=rows, verbose=0, callbacks=make_callbacks(None))
    steps = BIG // rows
    assert iterations == [(batch, (batch + 1) // steps) for batch in range(36 // rows)]
    assert optimizers == [optimizer]


@pytest.mark.gate
@pytest.mark.parametrize("save_freq", ["epoch", 2])  # updates
def test_model_checkpoint_saves_what_plain_keras_saves(save_freq, way, float64, tmp_path):
    saved = []
    for settings, rows in (way, (None, BIG)):
        folder = tmp_path / str(len(saved))

        def make_callbacks(steps, folder=folder):
            every = save_freq if save_freq == "epoch" else save_freq * steps
            path = str(folder / "{epoch:02d}-{batch:02d}.keras")
            if save_freq == "epoch":
                path = str(folder / "{epoch:02d}-{val_loss:.6f}.keras")
            return [keras.callbacks.ModelCheckpoint(path, save_freq=every)]

        data = dense_data(42 if save_freq == "epoch" else 48)  # updates of as many batches
        train(make_callbacks, settings, rows, data=data)
        saved.append([keras.saving.load_model(path) for path in sorted(folder.iterdir())])
        if save_freq == "epoch":
            names = [path.name for path in sorted(folder.iterdir())]
            assert names == sorted(path.name for path in (tmp_path / "0").iterdir())
    start = seeded(dense_model).get_weights()
    assert len(saved[0]) == len(saved[1]) == (4 if save_freq == "epoch" else 6)
    for model, reference in zip(*saved, strict=True):
        difference = relative_difference(model.get_weights(), reference.get_weights(), start)
        assert difference <= TOLERANCE[float64]
        assert model.optimizer.iterations == reference.optimizer.iterations


class CrashError(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Ends the run as a crash would, in the epoch `epoch`."""

    def __init__(self, epoch):
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            raise CrashError


def test_backup_and_restore_ends_with_the_uninterrupted_runs_weights(way, float64, tmp_path):
    crash = 2  # epochs

    def backup(*others):
        return [keras.callbacks.BackupAndRestore(tmp_path / "backup"), *others]

    uninterrupted = train(lambda _: None, *way)
    with pytest.raises(CrashError):
        train(lambda _: backup(Interrupt(crash)), *way)
    resumed = train(lambda _: backup(), *way)
    assert resumed.history.epoch == list(range(crash, 4))
    for weight, expected in zip(resumed.get_weights(), uninterrupted.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert resumed.optimizer.iterations == uninterrupted.optimizer.iterations == 12


def scalars(folder):
    """Return what TensorBoard would show: (tag, step) and value."""
    found = {}
    for path in sorted(folder.rglob("*tfevents*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                array = tf.make_ndarray(value.tensor)
                if array.dtype.kind == "f" and array.ndim == 0:
                    found[path.parent.name, value.tag, event.step] = float(array)
    return found


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorflow")
def test_tensorboard_shows_the_big_batchs_curves(way, float64, tmp_path):
    shown = []
    for settings, rows in (way, (None, BIG)):
        folder = tmp_path / str(len(shown))
        train(
            lambda _, folder=folder: [keras.callbacks.TensorBoard(folder, histogram_freq=1)],
            settings,
            rows,
        )
        shown.append(scalars(folder))
    names = {tag for _, tag, _ in shown[1]}
    assert {"epoch_loss", "epoch_mae", "epoch_learning_rate"} <= names
    assert shown[0].keys() == shown[1].keys()
    for key, value in shown[1].items():
        np.testing.assert_allclose(shown[0][key], value, rtol=1e-6, err_msg=str(key))


@pytest.mark.gate
def test_csv_logger_writes_the_big_batchs_logs(way, tmp_path, float64):
    tables = []
    for settings, rows in (way, (None, BIG)):
        path = tmp_path / f"{len(tables)}.csv"
        train(lambda _, path=path: [keras.callbacks.CSVLogger(path)], settings, rows)
        with path.open() as file:
            tables.append(list(csv.DictReader(file)))
    assert list(tables[0][0]) == list(tables[1][0])
    for row, expected in zip(*tables, strict=True):
        for name in row:
            np.testing.assert_allclose(float(row[name]), float(expected[name]), rtol=1e-10)


def test_terminate_on_nan_stops_in_the_same_window(way, float64):
    x, y = dense_data(42)
    x[14] = np.nan  # in the second window of the first epoch
    batches = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches[-1] += 1

    for settings, rows in (way, (None, BIG)):
        batches.append(0)
        model = train(
            lambda _: [keras.callbacks.TerminateOnNaN(), Count()], settings, rows, data=(x, y)
        )
        assert len(model.history.epoch) <= 1
        batches[-1] = -(-batches[-1] * rows // BIG)
    assert batches == [2, 2]


@pytest.mark.gate
@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swap_ema_weights(swap_on_epoch, way, float64, tmp_path):
    """Validation, and what is saved at an epoch's end, sees the averages."""
    seen = []

    class Look(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            seen[-1].append(self.model.get_weights())

        def on_epoch_end(self, epoch, logs=None):
            seen[-1].append(self.model.get_weights())

    def make_callbacks(_):
        seen.append([])
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch), Look()]

    def optimizer():
        return make_optimizer(use_ema=True, ema_momentum=0.7)

    model = train(make_callbacks, *way, optimizer=optimizer)
    reference = train(make_callbacks, optimizer=optimizer)
    assert_same(model, reference)
    start = seeded(dense_model).get_weights()
    for weights, expected in zip(*seen, strict=True):
        assert relative_difference(weights, expected, start) <= TOLERANCE[float64]
