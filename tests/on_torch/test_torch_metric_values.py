"""Metrics and logs on PyTorch that are given one number of a batch: exact, or told of."""

import warnings

import keras
import numpy as np
import pytest
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
    relative_difference,
    seeded,
)
from keras import ops
from torch_step import Step, torch

from ga_model import accumulate

UNLIKE = "A window of microbatches does not train as the full batch"


def mean_error(y, z):
    return ops.mean(ops.abs(y - z))


def fit(make, metrics, rows, settings=None):
    model = seeded(make)
    start = model.get_weights()
    if settings is not None:
        model = accumulate(model, **settings)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics())
    x, y = dense_data(34)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        logs = model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0).history
    said = [str(w.message) for w in caught if w.category is UserWarning]
    return start, model.get_weights(), logs, said


def compare(make, metrics, settings):
    """Return what differs in the logs, and what was said. Weights are equal."""
    rows = 4 if "accumulation_steps" in settings else 12
    start, weights, logs, said = fit(make, metrics, rows, settings)
    _, expected, known, _ = fit(make, metrics, 12)
    assert relative_difference(weights, expected, start) < 10 * LIMIT
    assert logs.keys() == known.keys()
    return [n for n in known if not np.allclose(logs[n], known[n], rtol=1e-5, atol=0)], said


STEPS = {"accumulation_steps": 3}
SIZE = {"microbatch_size": 5}
ADDED_UP = {"microbatch_size": 5, "loss_over": "microbatch"}


class LogsNumbers(keras.Model):
    """A step whose loss is over some of the entries, which logs other numbers too."""

    number_of_steps = 0.0

    def __init__(self):
        super().__init__()
        self.net, self.tracker = dense_model(), keras.metrics.Mean(name="tracked")
        self.total = keras.metrics.Sum(name="total")

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        updates = int(self.optimizer.iterations)
        self.zero_grad()
        errors = (self(x, training=True) - y) ** 2
        chosen = (y > 0).to(y.dtype)
        loss = (chosen * errors).sum() / chosen.sum()
        loss.backward()
        gradients = [w.value.grad for w in self.trainable_weights]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        with torch.no_grad():
            self.optimizer.apply(gradients)
        self.tracker.update_state(errors.mean())
        self.total.update_state(errors.sum())
        return {
            "now": loss.detach(),
            "other": (chosen * errors.abs().sqrt()).sum() / chosen.sum(),
            "mean": errors.mean().item(),
            "rate": float(self.optimizer.learning_rate),
            "worst": errors.max().detach(),
            "norm": norm,
            "samples": x.shape[0],
            "chosen": chosen.sum().to(torch.int32),
            "most": int(100 * errors.max()),
            "updates": updates,
            "tracked": self.tracker.result(),
            "total": self.total.result(),
        }


def logging():
    model = LogsNumbers()
    model.build((None, 4))
    return model


def test_logs_that_are_no_means_over_samples_are_told_of():
    differing, (said,) = compare(logging, lambda: None, STEPS)
    assert set(differing) == {"norm", "worst", "most"}
    assert said.startswith(UNLIKE)
    assert any(f"the log {name!r} differs" in said for name in differing)
    assert "and 2 more things do" in said
    assert compare(logging, lambda: None, SIZE) == ([], [])


class LogsTerms(LogsNumbers):
    """Its loss is the sum of two, which it logs after PyTorch took the gradient through them."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        z = self(x, training=True)
        one = torch.nn.functional.mse_loss(z, y)
        other = torch.nn.functional.smooth_l1_loss(z, y)
        (one + other).backward()
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights])
        self.tracker.update_state(other)
        return {"one": one, "tracked": self.tracker.result()}


@pytest.mark.parametrize("settings", [STEPS, ADDED_UP], ids=str)
def test_terms_whose_gradients_were_taken_are_put_together(settings):
    def make():
        model = LogsTerms()
        model.build((None, 4))
        return model

    assert compare(make, lambda: None, settings) == ([], [])


class LogsGradients(LogsNumbers):
    """It reads gradients after the update, and sets them to zero as scripts of PyTorch do."""

    def train_step(self, data):
        x, y = data
        loss = ((self(x, training=True) - y) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights])
        gradients = [w.value.grad for w in self.trainable_weights]
        sums = [g.sum() for g in gradients if g is not None]
        logs = {"now": loss.detach(), "sum": sum(sums), "norm": torch.stack(sums).norm()}
        for gradient in gradients:
            gradient.zero_()
        return logs


@pytest.mark.parametrize("settings", [STEPS, SIZE], ids=str)
def test_gradients_may_be_read_and_cleared_after_the_update(settings):
    def make():
        model = LogsGradients()
        model.build((None, 4))
        return model

    differing, said = compare(make, lambda: None, settings)
    if settings is SIZE:
        assert (differing, said) == ([], [])
    else:
        assert differing == ["norm"]
        assert ["the log 'norm' differs, however" in text for text in said] == [True]


def test_random_numbers_in_layers_are_no_reason_to_tell():
    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.tracker = keras.metrics.Mean(name="tracked")
            self.generator = keras.random.SeedGenerator(1)

        def call(self, x):
            x = x + keras.random.normal(ops.shape(x), seed=self.generator)
            self.tracker.update_state(ops.mean(ops.square(x)))
            return x

    model = accumulate(keras.Sequential([dense_model(), Noise()]), accumulation_steps=3)
    model.compile("sgd", "mse", metrics=[mean_error])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.fit(*dense_data(24), batch_size=4, verbose=0)


def test_what_cannot_be_tried_is_told_of():
    def of_three(y, z):
        return mean_error(y, z) if len(z) == 3 else 1 / 0

    model = accumulate(dense_model(), accumulation_steps=3)
    model.compile("sgd", "mse", metrics=[of_three])
    with pytest.warns(UserWarning, match=r"cannot be run on some samples.*ZeroDivisionError"):
        model.fit(*dense_data(9), batch_size=3, verbose=0)


class LogsCounts(Step):
    """Logs counts beside a loss that is zero where none of the samples is far off."""

    def forward_loss(self, x, y):
        self.errors = (self(x, training=True) - y) ** 2
        return torch.relu(self.errors - 0.8).mean()

    def train_step(self, data):
        _, y = data
        logs = super().train_step(data)
        far, errors = self.errors > 0.8, self.errors.detach().cpu().numpy()
        return {
            **logs,
            "item": logs["loss"].item(),
            "active": far.float().sum(),
            "numpy": errors.mean(),
            "array": np.asarray(errors.mean(axis=0)),
            "count": (errors > 0.8).sum(),
            "near": float((y > -50.0).float().mean()),
        }


@pytest.mark.parametrize("settings", [STEPS, ADDED_UP], ids=str)
def test_numbers_that_are_alike_by_chance_are_put_together(settings):
    x, y = dense_data(72)
    x[16:20], y[16:20] = 0.001 * x[16:20], 0.001 * y[16:20]  # of which none is far off
    y[50:52] = -100.0  # after all that is tried was near
    logs = []
    for arguments, rows in ((settings, 12 // settings.get("accumulation_steps", 1)), ({}, 12)):
        model = seeded(lambda: LogsCounts(dense_model().layers))
        model = accumulate(model, **arguments) if arguments else model
        model.compile(keras.optimizers.SGD(0.001))
        seen = []
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, seen=seen: seen.append(dict(logs))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model.fit(x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=[callback])
        logs.append(seen[12 // rows - 1 :: 12 // rows])
    for found, expected in zip(*logs, strict=True):
        assert list(found) == list(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
