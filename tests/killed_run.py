"""A run with a backup, and what kills it: `train`, for processes that `test_faults.py` starts."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import keras
import tensorflow as tf
from helpers import dense_data, dense_model, seeded

from ga_model import accumulate

SECONDS = 240  # within which a run has to end


class Killer:
    """A process that kills this one with SIGKILL, some seconds after a moment."""

    def __init__(self, seconds):
        kill = f"os.read(0, 1) and (time.sleep({seconds}), os.kill({os.getpid()}, 9))"
        command = [sys.executable, "-S", "-c", f"import os, time; {kill}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)

    def start(self):
        self._process.stdin.write(b"!")


class Backup(keras.callbacks.BackupAndRestore):
    """Keras's, which tells where it is: a line for every batch, and around what it writes."""

    def __init__(self, folder, moment, killer):
        super().__init__(folder / "backup", double_checkpoint=True, delete_checkpoint=False)
        self._events = (folder / "events").open("a", buffering=1)
        self._moment, self._killer = moment, killer
        self._number = dict.fromkeys(("batch", "saving", "saved"), 0)

    def _tell(self, event):
        self._events.write(f"{event}\n")
        self._number[event] += 1
        if (event, self._number[event]) == self._moment:
            self._killer.start()

    def on_train_batch_begin(self, batch, logs=None):
        self._tell("batch")

    def _save_model(self):
        self._tell("saving")
        super()._save_model()
        self._tell("saved")

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        if self._moment:
            signal.pause()  # the killer may be late


def mend(backup):
    """Make what a kill left of a backup agree with itself, and return the epoch to go on with.

    It is made at epochs' ends, so that the optimizer's iterations tell its epoch.
    """
    weights, metadata = backup / "latest.weights.h5", backup / "training_metadata.json"
    try:
        with h5py.File(weights) as file:
            updates = int(file["optimizer/vars/0"][()])
    except FileNotFoundError:
        return 0
    except OSError:
        older = backup / "training_metadata.json.bkp"
        if older.exists():  # Keras goes back to it
            return json.loads(older.read_text())["epoch"]
        shutil.rmtree(backup)
        return 0
    epoch = updates // 4  # of 40 rows, 12 for each
    metadata.write_text(json.dumps({"epoch": epoch, "batch": 0}))
    return epoch


def compiled(settings):
    model = seeded(dense_model)
    if settings:
        accumulate(model, **settings)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(settings, rows, epochs, callbacks=()):
    """Train, and return the model."""
    model = compiled(settings)
    x, y = dense_data(40)  # with a window that is partial and ragged
    model.fit(
        x, y, batch_size=rows, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return model


def train(folder, settings, rows, epochs, moment=None, seconds=0.0):
    """Train from the backup in the folder on, and return the weights.

    Args:
        moment: an event and its number, after which the process is killed, or None.
        seconds: how long after.
    """
    signal.alarm(SECONDS)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    backup = Backup(Path(folder), moment, Killer(seconds))
    return fit(settings, rows, epochs, [backup]).get_weights()
