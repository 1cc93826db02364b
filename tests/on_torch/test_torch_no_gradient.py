"""On PyTorch, windows whose first microbatches have no gradient, which tells nothing of a loss."""

import keras
import pytest
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
)
from keras import ops
from torch_step import Step
from training import difference_of_fits

WAY = {"rows": 4, "steps": 3}


def data(num_empty):
    """Return samples, the first of which count for nothing."""
    x, y = dense_data(36)
    y = abs(y) + 0.1
    y[:num_empty] *= -1
    return x, y


def counted(y_true, y_pred):
    return ops.relu(y_true) * ops.square(y_true - y_pred)


def total(y_true, y_pred):
    return 0.1 * ops.sum(counted(y_true, y_pred))


def mean(y_true, y_pred):
    return ops.mean(counted(y_true, y_pred))


def arguments(loss=None):
    return lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": loss}


def step_of(loss):
    class Own(Step):
        def forward_loss(self, x, y):
            return loss(y, self(x, training=True))

    return lambda: Own(dense_model().layers)


@pytest.mark.every_case
@pytest.mark.parametrize("num_empty", [4, 20])  # of one window, or of more
@pytest.mark.parametrize("loss", [total, mean])
def test_compiled_losses_match_the_full_batch(loss, num_empty):
    found = difference_of_fits(dense_model, arguments(loss), data(num_empty), **WAY)
    assert found <= LIMIT


@pytest.mark.every_case
@pytest.mark.parametrize("num_empty", [4, 20])
@pytest.mark.parametrize("loss", [mean, total])
def test_steps_of_ones_own_match_the_full_batch(loss, num_empty):
    found = difference_of_fits(step_of(loss), arguments(), data(num_empty), **WAY)
    assert found <= LIMIT
