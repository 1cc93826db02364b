"""Logs of windows on PyTorch: those of plain Keras on the full batch."""

import keras
import logged
import numpy as np
import pytest
from logged import (
    SETTINGS,
    plain_data,
)
from torch_step import torch


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
    "steps": (steps, plain_data, dict),
    "guide": (guide, plain_data, lambda: {"loss": "mse", "metrics": ["mae"]}),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_logs_of_windows_are_those_of_the_full_batch(case, settings):
    logged.check(CASES[case], settings)
