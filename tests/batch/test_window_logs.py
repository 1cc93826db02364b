"""Logs of windows: those of plain Keras on the full batch, whatever the loss averages over."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, float32_in_the_sweep, relative_difference, seeded
from keras import ops
from logged import (
    ROWS,
    SAMPLES,
    SETTINGS,
    STEPS,
    Logs,
    above_mean,
    dense,
    difference,
    mean_error,
    number_above,
    of_updates,
    plain_data,
)

from ga_model import accumulate


class Steps(keras.Model):
    """A step with trackers of its own, which logs numbers too."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.error = keras.metrics.Mean(name="error")
        self.chosen = keras.metrics.Mean(name="chosen")
        self.total = keras.metrics.Sum(name="total")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        chosen = tf.cast(y > 0, y.dtype)
        with tf.GradientTape() as tape:
            errors = (y - self(x)) ** 2
            loss = tf.reduce_sum(chosen * errors) / tf.reduce_sum(chosen)
        variables = self.trainable_variables
        rate = tf.identity(self.optimizer.learning_rate)
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.error.update_state(tf.reduce_mean(errors))
        self.chosen.update_state(loss, sample_weight=x.shape[0])
        self.total.update_state(tf.reduce_sum(errors))
        return {
            "now": loss,
            "sum": tf.reduce_sum(errors),
            "rate": rate,
            **{m.name: m.result() for m in (self.error, self.chosen, self.total)},
        }

    @property
    def metrics(self):
        return [self.error, self.chosen, self.total]


def steps():
    model = Steps()
    model(np.zeros((1, 4)))
    return model


CASES = {
    "steps": (steps, plain_data, dict),
    "functions": (
        dense,
        plain_data,
        lambda: {"loss": "mse", "metrics": [mean_error, number_above, above_mean, "mae"]},
    ),
}
RUNS = {"graph": {}, "xla": {"jit_compile": True}, "eager": {"run_eagerly": True}, "static": {}}


def trained(case, rows, settings, run):
    """Return weights, logs of the updates and of the epochs of a training without a warning."""
    make, data, arguments = CASES[case]
    model = seeded(make)
    start = model.get_weights()
    if settings is not None:
        model = accumulate(model, **settings)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.9)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), **arguments(), **RUNS[run])
    logs, batches = Logs(), tf.data.Dataset.from_tensor_slices(data())
    batches = batches.take(SAMPLES if run != "static" else SAMPLES - 4)
    batches = batches.batch(rows, drop_remainder=run == "static")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit = {"shuffle": False, "callbacks": [logs], "verbose": 0}
        history = model.fit(batches, epochs=2, **fit).history
    return start, model.get_weights(), logs.seen, history


def check(case, run, settings):
    start, *expected = trained(case, ROWS * STEPS, None, run)
    _, *found = trained(case, ROWS, SETTINGS[settings], run)
    tolerance = TOLERANCE[keras.config.floatx()]
    assert relative_difference(found[0], expected[0], start) < tolerance
    for logs, (_, known) in zip(of_updates(found[1]), expected[1], strict=True):
        assert difference(logs, known) < tolerance
    assert difference(found[2], expected[2]) < tolerance


@float32_in_the_sweep
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("run", ["graph", "static", "xla"])
@pytest.mark.parametrize("case", ["steps", "functions"])
def test_numbers_of_windows_are_those_of_the_full_batch(dtype, case, run, settings):
    check(case, run, settings)


def fit(model, x, y, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0, **kwargs)
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.parametrize("metric", [number_above, above_mean, mean_error])
def test_eagerly_metrics_that_are_no_mean_over_samples_are_told(metric):
    model = accumulate(dense(), accumulation_steps=STEPS)
    model.compile("sgd", "mse", metrics=[metric], run_eagerly=True)
    said = fit(model, *plain_data(), epochs=2)
    assert len(said) == (metric is not mean_error)
    assert all(repr(metric.__name__) in text for text in said)


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_losses_that_compare_samples_are_told_eagerly_too(run_eagerly):
    def dice(y, z):
        return 1 - 2 * ops.sum(y * z) / (ops.sum(y * y) + ops.sum(z * z))

    model = accumulate(dense(), accumulation_steps=STEPS)
    model.compile("sgd", dice, run_eagerly=run_eagerly)
    (said,) = fit(model, *plain_data())
    assert "'dice'" in said
    assert "RealDiv" in said


def test_what_cannot_be_read_eagerly_is_told():
    def error(y, z):
        return ops.mean((y - np.asarray(z)) ** 2, axis=-1) if tf.executing_eagerly() else 1 / 0

    model = accumulate(dense(), accumulation_steps=STEPS)
    model.compile("sgd", "mse", metrics=[error], run_eagerly=True)
    (said,) = fit(model, *plain_data())
    assert "cannot run in a graph (ZeroDivisionError)" in said
