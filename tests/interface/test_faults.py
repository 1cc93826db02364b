"""What is left of a run in which something breaks: the user's own error, and a model to go on with.

Every fault happens to plain Keras, too, which shows what the user would see without this package.
"""

import functools
import json
import os
import signal
import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
import training
from conftest import set_dtype
from helpers import (
    TOLERANCE,
    Applies,
    Batches,
    assert_changed,
    assert_close,
    assert_equal,
    dense_data,
    dense_model,
    parts_of,
    relative_difference,
    sequential,
)

from ga_model.tools._process import ProcessError, in_own_process

BIG = 12  # rows of a window
WAYS = {  # the settings, and the rows per batch
    "accumulation_steps": ({"accumulation_steps": 3}, 4),
    "microbatch_size": ({"microbatch_size": 4}, BIG),
    "both": ({"accumulation_steps": 3, "microbatch_size": 2}, 4),
}
FAULTY_ROW = 29  # of 40: in the middle of a window, and of a batch that is split
every_way = pytest.mark.parametrize("way", WAYS)


class UserError(Exception):
    pass


# What breaks. Each returns the arguments of a `fit` that fails, without its epochs.


class Fails(keras.callbacks.Callback):
    """Raises an error at an event, of a batch or the first of its kind."""

    def __init__(self, event, error, batch=None):
        super().__init__()
        setattr(self, event, self._fail)
        self._error, self._batch = error, batch

    def _fail(self, index, logs=None):
        if self._batch in (None, index):
            raise self._error


def in_a_callback(event, error, per_batch=True):
    def arguments(x, y, rows):
        callback = Fails(event, error, FAULTY_ROW // rows if per_batch else None)
        return {"x": x, "y": y, "batch_size": rows, "callbacks": [callback]}

    return arguments


def in_a_generator(x, y, rows):
    def batches():
        yield from parts_of(x, y, rows)[: FAULTY_ROW // rows]
        raise UserError("of the data")

    return {"x": batches(), "steps_per_epoch": -(-len(x) // rows)}


class FailingBatches(Batches):
    def __getitem__(self, index):
        if index == FAULTY_ROW // len(self.parts[0][0]):
            raise UserError("of the data")
        return super().__getitem__(index)


def in_a_py_dataset_with_workers(x, y, rows):
    return {"x": FailingBatches(parts_of(x, y, rows), workers=2)}


def in_what_runs(of):
    """Return a fault of the layer or of the loss, which look at their inputs."""

    def arguments(x, y, rows):
        {"layer": x, "loss": y}[of][FAULTY_ROW] = 1e6
        return {"x": x, "y": y, "batch_size": rows}

    return arguments


def on_a_full_disk(name):
    def arguments(x, y, rows):
        folder = Path(tempfile.mkdtemp(dir="."))
        (folder / name).symlink_to("/dev/full")
        callback = keras.callbacks.ModelCheckpoint(
            folder / name, save_weights_only=".weights" in name, save_freq=FAULTY_ROW // rows + 1
        )
        return {"x": x, "y": y, "batch_size": rows, "callbacks": [callback]}

    return arguments


FAULTS = {  # and what the error has to say
    "interrupt": (in_a_callback("on_train_batch_end", KeyboardInterrupt("by hand")), "by hand"),
    "on_train_batch_begin": (in_a_callback("on_train_batch_begin", UserError("here")), "here"),
    "on_epoch_begin": (in_a_callback("on_epoch_begin", UserError("here"), False), "here"),
    "on_epoch_end": (in_a_callback("on_epoch_end", UserError("here"), False), "here"),
    "generator": (in_a_generator, "of the data"),
    "PyDataset with workers": (in_a_py_dataset_with_workers, "of the data"),
    "running layer": (in_what_runs("layer"), "too large for what looks"),
    "running loss": (in_what_runs("loss"), "too large for what looks"),
    "full disk": (on_a_full_disk("model.keras"), "No space left on device"),
    "full disk, weights": (on_a_full_disk("model.weights.h5"), "No space left on device"),
}


def checked(x):
    """Return what is given, of which it looks at the values while it runs."""
    is_small = tf.debugging.assert_less(x, tf.cast(1e5, x.dtype), "too large for what looks")
    with tf.control_dependencies([is_small]):
        return tf.identity(x)


def checked_loss(y_true, y_pred):
    return keras.losses.mean_squared_error(checked(y_true), y_pred)


def checked_model():
    return sequential((4,), Applies(checked), *dense_model().layers)


def compiled(make=checked_model, loss=checked_loss, **settings):
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model = training.compiled(make, loss, optimizer, **settings)
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, *, epochs=2, **arguments):
    model._initial_epoch = None  # Keras 3.15 leaves it as a backup has set it, for every later fit
    return model.fit(epochs=epochs, shuffle=False, verbose=0, **arguments).history


def error_of(function, *args, **kwargs):
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        function(*args, **kwargs)
    return caught.value


def assert_same_error(error, expected, text):
    """Compare with plain Keras's. Tracebacks and the names of nodes differ."""
    assert type(error) is type(expected)
    assert text in str(error)
    assert text in str(expected)
    assert getattr(error, "__notes__", []) == getattr(expected, "__notes__", [])


def set_state(reference, model):
    """Give one model the weights and the optimizer's state of another, and return the weights."""
    reference.set_weights(model.get_weights())
    for variable, value in zip(
        reference.optimizer.variables, model.optimizer.variables, strict=True
    ):
        variable.assign(value)
    return model.get_weights()


def assert_same_training(model, reference, start, history, expected):
    assert model.optimizer.iterations == reference.optimizer.iterations
    assert_changed(reference.get_weights(), start)
    assert_close(model, reference, start)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-10)


def assert_goes_on(model, reference, rows, in_a_loop=True):
    """Train on, in a loop and with `fit`, as plain Keras does with whole windows."""
    start = set_state(reference, model)
    x, y = dense_data(28)
    if in_a_loop:
        loop(model, x=x[:BIG], y=y[:BIG], batch_size=rows)
        reference.train_on_batch(x[:BIG], y[:BIG])
    history = fit(model, x=x, y=y, batch_size=rows)
    expected = fit(reference, x=x, y=y, batch_size=BIG)
    assert_same_training(model, reference, start, history, expected)


@pytest.fixture(autouse=True, scope="module")
def fresh_keras():
    """Does once what is done before every test elsewhere: seeds make functions start anew."""
    keras.utils.clear_session()
    set_dtype("float64")
    yield
    set_dtype("float32")


@pytest.fixture(scope="module")
def models():
    """Models that all faults happen to, one after the other."""
    models = {way: compiled(**settings) for way, (settings, _) in WAYS.items()}
    return {**models, "plain": compiled(), "reference": compiled()}


def loop(model, *, x, y, batch_size):
    """Train as `fit` does, batch by batch."""
    for batch in parts_of(x, y, batch_size):
        model.train_on_batch(*batch)


@every_way
@pytest.mark.parametrize(
    ("fault", "train"),
    [*((fault, fit) for fault in FAULTS), ("running layer", loop), ("running loss", loop)],
)
def test_a_fault_is_the_users_own_and_leaves_nothing_behind(
    fault, train, way, models, tmp_path, monkeypatch
):
    """Of a batch that fails in a loop, any of the gradients and its weight may be added by then."""
    monkeypatch.chdir(tmp_path)
    _, rows = WAYS[way]
    make_arguments, text = FAULTS[fault]
    errors = []
    for name in (way, "plain"):
        arguments = make_arguments(*dense_data(40, seed=5), rows)
        errors.append(error_of(train, models[name], **arguments))
    assert_same_error(*errors, text)
    assert train is fit or models[way].has_updated
    assert_goes_on(models[way], models["reference"], rows)


class FailsToTrace(keras.layers.Layer):
    """Raises an error in `call`, or in what it returns as a loss, while there is one to raise."""

    error = None

    def call(self, inputs):
        if self.error is not None:
            raise self.error
        return inputs

    def loss(self, y_true, y_pred):
        self.call(y_true)
        return keras.losses.mean_squared_error(y_true, y_pred)


@pytest.mark.gate
@every_way
@pytest.mark.parametrize("place", ["layer", "loss"])
def test_a_fault_in_a_first_trace_leaves_a_model_that_can_be_traced(place, way):
    settings, rows = WAYS[way]
    models, errors = [], []
    x, y = dense_data(40, seed=5)
    for arguments in (settings, {}):
        parts = {"layer": FailsToTrace(), "loss": FailsToTrace()}
        layers = keras.layers.Dense(3), parts["layer"], keras.layers.Dense(2)
        make = functools.partial(sequential, (4,), *layers)
        models.append(compiled(make, parts["loss"].loss, **arguments))
        parts[place].error = UserError("here")
        errors.append(error_of(fit, models[-1], x=x, y=y, batch_size=rows))
        parts[place].error = None
    assert_same_error(*errors, "here")
    assert_goes_on(*models, rows, in_a_loop=False)


@pytest.mark.gate
@every_way
@pytest.mark.filterwarnings("ignore:It is not known whether")
def test_a_fault_in_a_later_trace_is_raised(way):
    settings, rows = WAYS[way]
    layer = FailsToTrace()
    parts = keras.layers.Dense(3), layer, keras.layers.Dense(2)
    model = compiled(functools.partial(sequential, (4,), *parts), metrics=["mae"], **settings)
    x, y = dense_data(40, seed=5)
    fit(model, x=x, y=y, batch_size=rows)
    layer.error = UserError("here")
    assert "here" in str(error_of(fit, model, x=x, y=y.astype("int32"), batch_size=rows))


@every_way
def test_training_that_is_stopped_inside_a_window_closes_it(way, models):
    _, rows = WAYS[way]
    model, reference = models[way], models["reference"]
    start = set_state(reference, model)
    x, y = dense_data(40, seed=5)
    last = FAULTY_ROW // rows
    stops = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", batch == last)
    )
    history = fit(model, x=x, y=y, batch_size=rows, callbacks=[stops])
    seen = slice((last + 1) * rows)
    expected = fit(reference, x=x[seen], y=y[seen], batch_size=BIG, epochs=1)
    assert_same_training(model, reference, start, history, expected)
    assert_goes_on(model, reference, rows)


class DeadlyBackup(keras.callbacks.BackupAndRestore):
    """Kills the process with SIGKILL where it is told to.

    Args:
        moment: an epoch, and what to do in it: the second "batch", or "saving" the weights without
            the number of the epoch; or None.
    """

    def __init__(self, folder, moment):
        super().__init__(folder / "backup", double_checkpoint=True, delete_checkpoint=False)
        self._moment, self._epoch = moment, None

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._epoch, "batch") == self._moment and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def _save_model(self):
        if (self._epoch, "saving") == self._moment:
            self.model.save_weights(self._weights_path, overwrite=True)
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_model()


def run(settings, rows, *callbacks):
    """Return a model that was trained, for five epochs of a partial and ragged window each."""
    model, (x, y) = compiled(dense_model, "mse", **settings), dense_data(40)
    fit(model, epochs=5, x=x, y=y, batch_size=rows, callbacks=list(callbacks))
    return model


def run_with_a_backup(folder, *args, moment=None):
    """Train from the backup in a folder on, and return the weights, and the epochs."""
    signal.alarm(240)  # seconds within which it has to end
    set_dtype("float64")
    model = run(*args, DeadlyBackup(folder, moment))
    return model.get_weights(), model.history.epoch


def mend(backup):
    """Make the epoch of a backup that of its weights, which the optimizer's iterations tell."""
    with h5py.File(backup / "latest.weights.h5") as file:
        updates = int(file["optimizer/vars/0"][()])
    epoch = {"epoch": updates // 4, "batch": 0}  # of 40 rows, 12 for each
    (backup / "training_metadata.json").write_text(json.dumps(epoch))


@pytest.mark.gate
@every_way
def test_a_run_that_is_killed_and_started_again_ends_as_one_that_was_not(way, tmp_path):
    """In a window, and when the weights of a backup are written, and the number of epochs not."""

    def in_a_process(**kwargs):
        train = functools.partial(run_with_a_backup, tmp_path, *WAYS[way], **kwargs)
        return in_own_process("The run", train)

    for moment in ((1, "batch"), (2, "saving")):
        with pytest.raises(ProcessError) as error:
            in_a_process(moment=moment)
        assert error.value.exit_code == -signal.SIGKILL, error.value
    mend(tmp_path / "backup")
    weights, epochs = in_a_process()
    assert epochs == [3, 4]
    assert_equal(weights, run(*WAYS[way]).get_weights())
    reference = run({}, BIG)  # plain Keras, on whole windows
    start = compiled(dense_model, "mse").get_weights()
    assert relative_difference(weights, reference.get_weights(), start) <= TOLERANCE["float64"]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "microbatch_size"])
def test_a_backup_inside_a_window_has_the_weights_of_the_last_update(way, models, tmp_path):
    model, reference = models[way], models["reference"]
    _, rows = WAYS[way]
    start = set_state(reference, model)
    x, y = dense_data(40, seed=5)
    batch = FAULTY_ROW // rows
    arguments = {"x": x, "y": y, "batch_size": rows}

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)

    fails = Fails("on_train_batch_end", UserError("here"), batch)
    with pytest.warns(UserWarning, match="was saved while a window is open.*but not the grad"):
        error_of(fit, model, **arguments, callbacks=[backup(), fails])
    updated = slice((batch + 1) // 3 * BIG)
    fit(reference, x=x[updated], y=y[updated], batch_size=BIG, epochs=1)
    assert_changed(model.get_weights(), start)
    model.set_weights(start)
    history = fit(model, **arguments, callbacks=[backup()])
    expected = fit(reference, x=x, y=y, batch_size=BIG)
    assert_same_training(model, reference, start, history, expected)
