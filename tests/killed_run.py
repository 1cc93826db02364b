"""A run with a backup, which kills itself: `train`, for processes that `test_faults.py` starts."""

import json
import os
import signal
from pathlib import Path

import h5py
import keras
import tensorflow as tf
from helpers import dense_data, dense_model, seeded

from ga_model import accumulate

SECONDS = 240  # within which a run has to end
EPOCHS = 5


class Backup(keras.callbacks.BackupAndRestore):
    """Keras's, which kills the process with SIGKILL where it is told to.

    Args:
        moment: an epoch, and what to do in it: the second "batch", or "saving" the weights without
            the number of the epoch; or None.
    """

    def __init__(self, folder, moment):
        super().__init__(folder / "backup", double_checkpoint=True, delete_checkpoint=False)
        self._moment, self._epoch = moment, None

    def _kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._epoch, "batch") == self._moment and batch == 1:
            self._kill()

    def _save_model(self):
        if (self._epoch, "saving") == self._moment:
            self.model.save_weights(self._weights_path, overwrite=True)
            self._kill()
        super()._save_model()


def mend(backup):
    """Make the epoch of a backup that of its weights, which the optimizer's iterations tell."""
    with h5py.File(backup / "latest.weights.h5") as file:
        updates = int(file["optimizer/vars/0"][()])
    epoch = {"epoch": updates // 4, "batch": 0}  # of 40 rows, 12 for each
    (backup / "training_metadata.json").write_text(json.dumps(epoch))


def compiled(settings):
    model = seeded(dense_model)
    if settings:
        accumulate(model, **settings)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(settings, rows, *callbacks):
    """Train, and return the model."""
    model = compiled(settings)
    arguments = {"batch_size": rows, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    # With a window that is partial and ragged.
    model.fit(*dense_data(40), callbacks=list(callbacks), **arguments)
    return model


def train(folder, settings, rows, moment=None):
    """Train from the backup in the folder on, and return the weights, and the epochs."""
    signal.alarm(SECONDS)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    model = fit(settings, rows, Backup(Path(folder), moment))
    return model.get_weights(), model.history.epoch
