"""On PyTorch, what a loss of one's own is divided by is found, once trying has shown where."""

import warnings

import keras
import numpy as np
import pytest
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
)
from keras import layers
from torch_step import Step, torch
from training import difference_of_fits, train

functional = torch.nn.functional
WAYS = {
    "steps": {"rows": 4, "steps": 3},
    "both": {"rows": 6, "steps": 2, "size": 4},
    "size": {"rows": 12, "size": 4},
}


def mask_of(y):
    return (y[:, 0] > -0.3).float()


def quotient(y, z):
    mask = mask_of(y)
    return (mask * torch.square(z - y).mean(1)).sum() / mask.sum()


def at_least_one(y, z):
    mask = mask_of(y)
    return (mask * torch.square(z - y).mean(1)).sum() / mask.sum().clamp(min=1.0)


def selected(y, z):
    return torch.square(z - y)[mask_of(y) > 0].mean()


def of_classes(y, z):
    labels = torch.where(mask_of(y) > 0, (y[:, 0] > 0.4).long(), -100)
    return functional.cross_entropy(z, labels)  # which ignores -100


LOSSES = {f.__name__: f for f in (quotient, at_least_one, selected, of_classes)}


def later(rows=60, plain=40):
    """Return data in which no sample is masked before row `plain`, and one microbatch wholly is."""
    x, y = dense_data(rows)
    y[:plain, 0] = np.abs(y[:plain, 0])
    y[plain + 4 : plain + 8, 0] = -1.0
    return x, y


def step_of(loss):
    class Own(Step):
        def forward_loss(self, x, y):
            return loss(y, self(x, training=True))

    return lambda: Own([keras.Input((4,)), *dense_model().layers])


def compiled_with(loss):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": loss}


@pytest.fixture(autouse=True)
def _tells_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.every_case
@pytest.mark.parametrize("way", ["steps", "both"])
@pytest.mark.parametrize("name", LOSSES)
def test_steps_of_ones_own_match_the_full_batch(name, way):
    make = step_of(LOSSES[name])
    found = difference_of_fits(make, compiled_with(None), later(), epochs=1, **WAYS[way])
    assert found <= LIMIT


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_compiled_losses_match_the_full_batch(name, way):
    arguments = compiled_with(LOSSES[name])
    found = difference_of_fits(dense_model, arguments, later(), epochs=1, **WAYS[way])
    assert found <= LIMIT


def of_two():
    x = keras.Input((4,))
    outputs = {name: layers.Dense(2, name=name)(x) for name in ("a", "b")}
    return keras.Model(x, outputs)


def other(y, z):
    mask = (y[:, 1] > 0).float()
    return (mask * torch.square(z - y).mean(1)).sum() / mask.sum()


@pytest.mark.parametrize("loss", [other, "mse"])
def test_two_losses_with_different_weights_match_where_a_batch_is_split(loss):
    """They are divided by the same number in the first batch."""
    x, y = later(36, plain=12)
    arguments = compiled_with({"a": quotient, "b": loss})
    data = (x, {"a": y, "b": y[:, ::-1].copy()})
    assert difference_of_fits(of_two, arguments, data, rows=12, size=5) <= LIMIT


def shared(y, z):
    mask = mask_of(y)
    return mask * torch.square(z - y).mean(1) / mask.mean()


def test_values_that_are_divided_by_another_number_later_are_told_of():
    x, y = dense_data(60)
    y[:40, 0] = np.abs(y[:40, 0])
    y[40:, 0] = np.arange(20) % 3 - 1.0
    with pytest.warns(UserWarning, match="Updates so far may differ from those of the full batch"):
        train(dense_model, compiled_with(shared), (x, y), rows=4, accumulation_steps=3, epochs=1)


def test_logs_of_a_split_batch_are_those_of_the_full_batch():
    arguments = compiled_with(quotient)
    logs = [
        train(dense_model, arguments, later(), rows=12, epochs=1, **settings)[0].history.history
        for settings in ({}, {"microbatch_size": 4})
    ]
    np.testing.assert_allclose(logs[1]["loss"], logs[0]["loss"], rtol=1e-5)
