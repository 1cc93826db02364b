"""One worker of a cluster: `python worker.py JOB DIRECTORY`, started by `test_workers.py`.

It reads `start.npz`, weights and data, from the directory, and writes what came out to it.
"""

import inspect
import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from helpers import dense_model

from ga_model import accumulate

SETTINGS = {"accumulation_steps": 2, "microbatch_size": 2}
# Before Keras 3.10, those of replicas cannot be updated microbatch by microbatch.
METRICS = ["mae"] if "synchronization" in inspect.signature(keras.Variable).parameters else None
ROWS = 8  # per batch
EPOCHS = 4  # of the run that is interrupted, in the third
# Of this worker, or None in a process of its own.
INDEX = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": null}}'))["task"]["index"]


def compiled(start, strategy, rate=0.01, **settings):
    with strategy.scope():
        model = accumulate(dense_model(), **settings)
        optimizer = keras.optimizers.Adam(rate, clipnorm=0.05)
        model.compile(optimizer, "mse", metrics=METRICS)
    model.set_weights(start)
    return model


def train(strategy, start, x, y, directory):
    model = compiled(start, strategy, **SETTINGS)
    fit = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, validation_data=(x[:11], y[:11]), **fit).history
    evaluated = model.evaluate(x, y, batch_size=ROWS, verbose=0, return_dict=True)
    history |= {f"evaluate_{key}": value for key, value in evaluated.items()}
    save(directory / f"trained{INDEX}", model, predictions=model.predict(x), **history)


class Dies(keras.callbacks.Callback):
    """Kills the second worker in the middle of the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        self.is_last = epoch == 2 and INDEX == 1

    def on_train_batch_begin(self, batch, logs=None):
        if self.is_last and batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def resume(strategy, start, x, y, directory, callbacks=()):
    model = compiled(start, strategy, accumulation_steps=3)
    backup = keras.callbacks.BackupAndRestore(directory / f"backup{INDEX}")
    fit = {"batch_size": ROWS, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[*callbacks, backup], **fit)
    save(directory / f"resumed{INDEX}", model)


def die(*args):
    resume(*args, callbacks=[Dies()])


def save(path, model, **more):
    np.savez(path, *model.get_weights(), **more)


def load(path):
    """Return the weights, and what was saved with them."""
    with np.load(path) as saved:
        arrays = dict(saved)
    weights = [name for name in arrays if name.startswith("arr_")]  # in their order
    return [arrays.pop(name) for name in weights], arrays


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    job, directory = globals()[sys.argv[1]], Path(sys.argv[2])
    start, data = load(directory / "start.npz")
    job(strategy, start, data["x"], data["y"], directory)
