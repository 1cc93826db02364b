"""Keras's callbacks see and do what they do with plain Keras on the full batch, on any backend."""

import csv

import keras
import numpy as np
import pytest
from case import BACKEND, PRECISION, WINDOW, rows_of
from conftest import set_dtype
from helpers import TOLERANCE, assert_close, dense_data, dense_model, relative_difference, seeded
from keras import callbacks
from training import assert_close_logs, compiled

WAYS = {"windows": {"accumulation_steps": 3}, "split": {"microbatch_size": 4}}  # of 12 samples
OF_LOGS = {"float64": 1e-10, "float32": 1e-5}[PRECISION]

every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def precision(fresh_keras):
    set_dtype(PRECISION)


def train(made, settings, data=None, **of_optimizer):
    """Train a model with or without settings, with validation."""
    x, y = data or dense_data(42)  # with a window that is partial and ragged
    optimizer = keras.optimizers.Adam(0.05, **of_optimizer)
    model = compiled(optimizer=optimizer, metrics=["mae"], **settings)
    fit = {"epochs": 4, "shuffle": False, "verbose": 0, "callbacks": made}
    rows = rows_of(settings)
    model.fit(x[:-12], y[:-12], batch_size=rows, validation_data=(x[-12:], y[-12:]), **fit)
    return model


class Watch(callbacks.Callback):
    """Reads the optimizer and the weights wherever it can."""

    def __init__(self):
        super().__init__()
        self.events, self.weights = [], []

    def note(self, *event):
        self.events.append((*event, int(self.model.optimizer.iterations)))
        self.weights.append(self.model.get_weights())

    def on_epoch_begin(self, epoch, logs=None):
        self.note("epoch begins", epoch)

    def on_test_begin(self, logs=None):
        self.note("validation begins")

    def on_test_end(self, logs=None):
        self.note("validation ends")

    def on_epoch_end(self, epoch, logs=None):
        rate = round(float(self.model.optimizer.learning_rate), 6)
        self.note("epoch ends", epoch, rate, *sorted(logs))


# By a folder, and the batches of an update.
MADE = {
    "stops early": lambda folder, steps: [
        callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 if epoch else 0.05),
        callbacks.EarlyStopping(patience=1, restore_best_weights=True),
    ],
    "swaps averages": lambda folder, steps: [callbacks.SwapEMAWeights()],
    "saves": lambda folder, steps: [
        callbacks.ModelCheckpoint(str(folder / "{epoch:02d}-{val_loss:.3f}.keras"))
    ],
    "lowers the rate": lambda folder, steps: [
        callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=10.0)
    ],
    "saves by updates": lambda folder, steps: [
        callbacks.ModelCheckpoint(str(folder / "{epoch:02d}.keras"), save_freq=3 * steps)
    ],
    "logs": lambda folder, steps: [callbacks.CSVLogger(folder / "log.csv")],
    # What is saved at an epoch's end sees them, too.
    "swaps averages by epoch": lambda folder, steps: [callbacks.SwapEMAWeights(swap_on_epoch=True)],
}


@every_way
@pytest.mark.parametrize("name", MADE)
def test_callbacks_steer_and_see_the_training_of_the_full_batch(name, way, tmp_path):
    models, watches, folders = [], [], [tmp_path / "found", tmp_path / "expected"]
    averages = {"use_ema": True, "ema_momentum": 0.7} if "averages" in name else {}
    data = dense_data(48) if name == "saves by updates" else None  # updates of as many batches
    for folder, settings in zip(folders, (WAYS[way], {})):
        folder.mkdir()
        made = MADE[name](folder, settings.get("accumulation_steps", 1))
        watches.append(Watch())
        models.append(train([*made, watches[-1]], settings, data, **averages))
    start = seeded(dense_model).get_weights()
    assert_close(*models, start)
    assert models[0].history.epoch == models[1].history.epoch
    assert_close_logs(*(model.history.history for model in models), OF_LOGS, 0.0)
    assert watches[0].events == watches[1].events
    for weights, expected in zip(*(watch.weights for watch in watches), strict=True):
        assert relative_difference(weights, expected, start) <= TOLERANCE[PRECISION]
    if name == "stops early":
        assert len(models[0].history.epoch) < 4
    if name == "lowers the rate":
        assert float(models[0].optimizer.learning_rate) < 0.05 * 0.3**2
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert len(names[0]) == {"saves": 4, "saves by updates": 4, "logs": 1}.get(name, 0)
    for found, expected in ([folder / file for folder in folders] for file in names[0]):
        if name == "logs":
            lines = (path.read_text().splitlines() for path in (found, expected))
            tables = [list(csv.DictReader(table)) for table in lines]
            for rows in zip(*tables, strict=True):
                assert_close_logs(*rows, OF_LOGS, 0.0)
        else:
            saved = [keras.saving.load_model(path) for path in (found, expected)]
            assert_close(*saved, start)
            assert len({int(model.optimizer.iterations) for model in saved}) == 1


@every_way
def test_terminate_on_nan_stops_in_the_same_window(way):
    x, y = dense_data(42)
    x[14] = np.nan  # in the second window of the first epoch
    batches = []
    count = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    model = train([callbacks.TerminateOnNaN(), count], WAYS[way], (x, y))
    assert len(model.history.epoch) <= 1
    assert -(-len(batches) * rows_of(WAYS[way]) // WINDOW) == 2


def scalars(folder):
    """Return what TensorBoard would show: (tag, step) and value."""
    import tensorflow as tf

    found = {}
    for path in sorted(folder.rglob("*tfevents*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                array = tf.make_ndarray(value.tensor)
                if array.dtype.kind == "f" and array.ndim == 0:
                    found[path.parent.name, value.tag, event.step] = float(array)
    return found


@pytest.mark.gate
@pytest.mark.skipif(BACKEND != "tensorflow", reason="it writes by TensorFlow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorflow")
@every_way
def test_tensorboard_shows_the_big_batchs_curves(way, tmp_path):
    shown = []
    for settings in (WAYS[way], {}):
        folder = tmp_path / str(len(shown))
        train([callbacks.TensorBoard(folder, histogram_freq=1)], settings)
        shown.append(scalars(folder))
    assert {"epoch_loss", "epoch_mae", "epoch_learning_rate"} <= {tag for _, tag, _ in shown[1]}
    assert shown[0].keys() == shown[1].keys()
    for key, value in shown[1].items():
        np.testing.assert_allclose(shown[0][key], value, rtol=1e-6, err_msg=str(key))
