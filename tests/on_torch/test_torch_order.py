"""Steps on PyTorch that set what their optimizer updates with, or use weights after the update."""

import re
import warnings

import keras
import numpy as np
import pytest
from helpers import (
    LIMIT,
    assert_changed,
    dense_data,
    dense_model,
    relative_difference,
    seeded,
)
from keras import ops
from torch_step import torch

from ga_model import accumulate


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.net, self.tracker = dense_model(), keras.metrics.Mean(name="tracked")

    def call(self, x):
        return self.net(x)

    def before(self, loss):
        """Run before the update."""

    def after(self, x, y):
        """Run after the update, and return what is logged beside the loss."""
        return {}

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ((self(x, training=True) - y) ** 2).mean()
        loss.backward()
        self.tracker.update_state(loss)
        self.before(loss.detach())
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights])
            logs = self.after(x, y)
        return {"loss": self.tracker.result(), **logs}


def fit(make, rows, settings=None, compile_args=lambda: {"optimizer": keras.optimizers.SGD(0.1)}):
    """Return weights, logs and what was said."""
    model = seeded(make)
    model.build((None, 4))
    start = model.get_weights()
    if settings is not None:
        model = accumulate(model, **settings)
    model.compile(**compile_args())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        fit = {"batch_size": rows, "epochs": 2, "shuffle": False, "verbose": 0}
        logs = model.fit(*dense_data(48), **fit).history
    said = [str(w.message) for w in caught if w.category is UserWarning]
    assert_changed(model.get_weights(), start)
    return start, model.get_weights(), logs, said


STEPS = {"accumulation_steps": 3}
BOTH = {"accumulation_steps": 3, "microbatch_size": 3}
ADDED_UP = {"microbatch_size": 4, "loss_over": "microbatch"}
SIZE = {"microbatch_size": 5}


def compare(make, settings, **kwargs):
    """Return how far weights are off, the names of logs that are, and what was said."""
    rows = 8 if "accumulation_steps" in settings else 24
    start, weights, logs, said = fit(make, rows, settings, **kwargs)
    _, expected, known, _ = fit(make, 24, **kwargs)
    off = [n for n in known if not np.allclose(logs[n], known[n], rtol=1e-5, atol=0)]
    return relative_difference(weights, expected, start), off, said


# What a step sets of its optimizer.

SCHEDULE = keras.optimizers.schedules.CosineDecay(0.05, 4, warmup_target=0.1, warmup_steps=2)
RATES_TOLD = {
    "its own": lambda o, loss: o.learning_rate.assign(0.9 * o.learning_rate),
    "of the loss": lambda o, loss: o.learning_rate.assign(0.1 * loss),
    "in some": lambda o, loss: loss > 1.8 and o.learning_rate.assign(0.01),
}
RATES_EXACT = {
    "schedule": lambda o, loss: o.learning_rate.assign(SCHEDULE(o.iterations)),
    "constant": lambda o, loss: o.learning_rate.assign(0.05),
    "attribute": lambda o, loss: setattr(o, "learning_rate", 0.05),
    "nothing": lambda o, loss: None,
}


def setting(set_rate):
    class Sets(OwnStep):
        def before(self, loss):
            set_rate(self.optimizer, loss)

    return Sets


@pytest.mark.parametrize("settings", [STEPS, BOTH, ADDED_UP], ids=str)
@pytest.mark.parametrize("name", RATES_TOLD)
def test_a_rate_that_a_step_moves_by_itself_is_told_of(name, settings):
    off, _, (said,) = compare(setting(RATES_TOLD[name]), settings)
    assert re.search(r"learning_rate differs", said)
    assert off > 1e-3


@pytest.mark.parametrize("settings", [STEPS, BOTH, ADDED_UP, SIZE], ids=str)
@pytest.mark.parametrize("name", RATES_EXACT)
def test_a_rate_that_is_the_same_for_all_microbatches_is_not(name, settings):
    off, _, said = compare(setting(RATES_EXACT[name]), settings)
    assert not said
    assert off < 10 * LIMIT


def test_optimizers_that_keep_books_are_no_reason_to_tell():
    def compile_args():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        adam = keras.optimizers.Adam(schedule, use_ema=True)
        return {"optimizer": keras.optimizers.LossScaleOptimizer(adam, initial_scale=4.0)}

    class Scales(OwnStep):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = ((self(x, training=True) - y) ** 2).mean()
            self.optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                self.optimizer.apply([w.value.grad for w in self.trainable_weights])
            return {"loss": loss.detach()}

    _, off, said = compare(Scales, STEPS, compile_args=compile_args)
    assert not said
    assert not off


# What a step computes with weights that it has updated.


class Predicts(OwnStep):
    def after(self, x, y):
        return {"late": ops.mean(ops.square(self(x) - y))}


class Measures(OwnStep):
    def __init__(self):
        super().__init__()
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def after(self, x, y):
        self.error.update_state(y, self(x))
        return {"late": self.error.result()}


class Weighs(OwnStep):
    def after(self, x, y):
        return {"late": sum(ops.sum(ops.square(w)) for w in self.trainable_weights)}


class Counts(OwnStep):
    def after(self, x, y):
        return {"late": int(self.optimizer.iterations)}


@pytest.mark.parametrize("settings", [STEPS, BOTH, ADDED_UP], ids=str)
@pytest.mark.parametrize("make", [Predicts, Counts, Measures, Weighs])
def test_values_of_updated_weights_are_told_of(make, settings):
    off, names, (said,) = compare(make, settings)
    assert off < 10 * LIMIT
    assert names == ["late"]
    assert "'late' differs" in said


@pytest.mark.parametrize("make", [Predicts, Counts, Measures, Weighs])
def test_with_a_microbatch_size_they_are_exact(make):
    off, names, said = compare(make, SIZE)
    assert off < 10 * LIMIT
    assert not names
    assert not said


class Frozen(OwnStep):
    """Calls layers after the update that it does not update, and others for nothing."""

    def __init__(self):
        super().__init__()
        self.other = dense_model()
        self.other.trainable = False

    def after(self, x, y):
        self(x)
        return {"other": ops.mean(ops.square(self.other(x) - y))}


@pytest.mark.parametrize("settings", [STEPS, BOTH], ids=str)
def test_calls_of_other_layers_are_not(settings):
    off, names, said = compare(Frozen, settings)
    assert off < 10 * LIMIT
    assert not names
    assert not said


class Alternates(OwnStep):
    """Takes gradients after an update, as GANs do, and logs what it has."""

    def __init__(self):
        super().__init__()
        self.judge = dense_model()
        self.second = keras.optimizers.SGD(0.1, name="second")

    def train_step(self, data):
        x, y = data
        logs = {}
        for net, optimizer in ((self.judge, self.optimizer), (self.net, self.second)):
            self.zero_grad()
            loss = ((self.net(x) + self.judge(x) - y) ** 2).mean()
            loss.backward()
            weights = net.trainable_weights
            with torch.no_grad():
                optimizer.apply([w.value.grad for w in weights], weights)
            logs[optimizer.name] = loss.detach()
        return logs


def test_steps_that_alternate_are_told_of_once():
    *_, said = fit(Alternates, 8, STEPS)
    (said,) = said
    assert "does not train as the full batch" in said


# What a step computes with metrics that it updates.


class Weighted(OwnStep):
    """Weighs its loss by a metric."""

    is_updated = True

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ((self(x, training=True) - y) ** 2).mean()
        (loss / (1.0 + self.tracker.result())).backward()
        if self.is_updated:
            self.tracker.update_state(loss)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights])
        return {"loss": loss.detach()}


class Unmoved(Weighted):
    is_updated = False


@pytest.mark.parametrize("settings", [STEPS, BOTH, ADDED_UP], ids=str)
def test_gradients_that_depend_on_a_metric_are_told_of(settings):
    *_, (said,) = compare(Weighted, settings)
    assert "does not train as the full batch" in said


def test_gradients_that_depend_on_a_metric_that_stays_are_not():
    off, _, said = compare(Unmoved, STEPS)
    assert off < 10 * LIMIT
    assert not said
