"""Logs of windows on PyTorch: those of plain Keras on the full batch."""

import warnings

import keras
import logged
import numpy as np
import pytest
from helpers import dense_data, relative_difference, seeded
from logged import (
    ROWS,
    SETTINGS,
    STEPS,
    Logs,
    dense,
    difference,
    of_updates,
    plain_data,
    tagger,
    tokens,
)
from pairs import TOLERANCE
from torch_step import torch

from ga_model import accumulate


class Steps(keras.Model):
    """A step with trackers of its own, which logs numbers too."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.item = keras.metrics.Mean(name="item")
        self.chosen = keras.metrics.Mean(name="chosen")
        self.weighed = keras.metrics.Mean(name="weighed")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        chosen = (y > 0).to(y.dtype)
        self.zero_grad()
        loss = (chosen * (y - self(x)) ** 2).sum() / chosen.sum()
        loss.backward()
        rate = float(self.optimizer.learning_rate)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights])
        self.item.update_state(loss.item())
        self.chosen.update_state(loss)
        self.weighed.update_state(loss.detach(), sample_weight=x.shape[0])
        return {
            "now": loss.detach(),
            "float": loss.item(),
            "rate": rate,
            **{m.name: m.result() for m in (self.item, self.chosen, self.weighed)},
        }

    @property
    def metrics(self):
        return [self.item, self.chosen, self.weighed]


def steps():
    model = Steps()
    model(np.zeros((1, 4)))
    return model


class Guide(keras.Model):
    """The step of Keras's guide: it gives the loss to Keras's own mean as one number per batch."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        z = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=z)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights])
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, z)
        return {m.name: m.result() for m in self.metrics}


def guide():
    x = keras.Input((4,))
    return Guide(x, keras.layers.Dense(2)(x))


CASES = {
    **logged.CASES,
    "steps": (steps, plain_data, dict),
    "guide": (guide, plain_data, lambda: {"loss": "mse", "metrics": ["mae"]}),
}


def trained(case, rows, settings):
    """Return weights, logs of the updates and of the epochs of a training without a warning."""
    make, data, arguments = CASES[case]
    model = seeded(make)
    start = model.get_weights()
    if settings is not None:
        model = accumulate(model, **settings)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.9)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), **arguments())
    logs = Logs()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        x, y, weights = (*data(), None)[:3]
        fit = {"batch_size": rows, "shuffle": False, "callbacks": [logs], "verbose": 0}
        history = model.fit(x, y, sample_weight=weights, epochs=2, **fit).history
    return start, model.get_weights(), logs.seen, history


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_logs_of_windows_are_those_of_the_full_batch(case, settings):
    start, *expected = trained(case, ROWS * STEPS, None)
    _, *found = trained(case, ROWS, SETTINGS[settings])
    assert relative_difference(found[0], expected[0], start) < 10 * TOLERANCE
    for logs, (_, known) in zip(of_updates(found[1]), expected[1], strict=True):
        assert difference(logs, known) < TOLERANCE
    assert difference(found[2], expected[2]) < TOLERANCE


def test_metrics_that_are_reset_within_a_window_begin_again():
    model = accumulate(seeded(tagger), accumulation_steps=STEPS)
    model.compile("sgd", "mse")
    x, y = tokens()
    batches = [(x[i : i + ROWS], y[i : i + ROWS]) for i in range(0, ROWS * STEPS, ROWS)]
    expected = float(model.test_on_batch(x[: ROWS * STEPS], y[: ROWS * STEPS]))
    for batch in batches:
        model.reset_metrics()
        loss = model.train_on_batch(*batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # of the window, and nothing twice


def test_microbatches_that_are_skipped_count_for_nothing():
    x, y = dense_data(ROWS * STEPS)
    y[:ROWS] = np.nan
    model = accumulate(seeded(dense), accumulation_steps=STEPS, skip_nonfinite=True)
    model.compile("sgd", "mse")
    expected = float(model.test_on_batch(x[ROWS:], y[ROWS:]))
    model.reset_metrics()
    warnings.filterwarnings("ignore", "Microbatches of")
    for i in range(0, ROWS * STEPS, ROWS):
        loss = model.train_on_batch(x[i : i + ROWS], y[i : i + ROWS])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
