"""On PyTorch, random trainings equal plain Keras on the full batch, or it is said otherwise."""

import warnings

import keras
import numpy as np
import pytest
from helpers import LIMIT
from torch_step import torch
from training import difference_of_fits, difference_of_orders
from zoo import OPTIMIZERS, ZOO

LOSSES = [keras.losses.MeanSquaredError, keras.losses.Huber, keras.losses.LogCosh]
REDUCTIONS = ["sum_over_batch_size", "mean_with_sample_weight", "sum"]


def draw(seed):
    """Return what a training is of: a model, arguments of `compile`, data, and settings."""
    generator = np.random.default_rng(seed)
    name, optimizer = generator.choice(list(ZOO)), generator.choice(list(OPTIMIZERS))
    make, make_data = ZOO[name]
    rows, steps = int(generator.integers(2, 7)), int(generator.integers(1, 5))
    size = [None, *range(1, rows + 1)][generator.integers(0, rows + 1)]
    total = int(generator.integers(2 * rows * steps, 4 * rows * steps))
    x, y = make_data(total)
    data = [x, y]
    if generator.random() < 0.5:
        shape = (total, 5) if name == "masked_recurrent" else (total,)
        weights = generator.uniform(0.1, 3.0, size=shape).astype("float32")
        data.append([weights, weights[::-1].copy()] if name == "two_outputs" else weights)
    loss, reduction = generator.choice(LOSSES), str(generator.choice(REDUCTIONS))

    def arguments():
        losses = loss(reduction=reduction)
        if name == "two_outputs":
            losses = [losses, loss(reduction="mean")]
        # Adaptive optimizers make full steps out of rounding where a gradient is near zero.
        return {"optimizer": OPTIMIZERS[optimizer](), "loss": losses}

    return make, arguments, tuple(data), rows, steps, size


class OwnStep(keras.Model):
    """A model with a step of its own, as in Keras's guide."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(30))
def test_random_trainings_match_or_are_told(seed):
    assert_match_or_told(*draw(seed))


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(100, 112))
def test_random_trainings_by_steps_of_ones_own_match_or_are_told(seed):
    make, *rest = draw(seed)
    assert_match_or_told(lambda: OwnStep(make()), *rest)


def assert_match_or_told(make, arguments, data, rows, steps, size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        order = difference_of_orders(make, arguments, data, rows=rows * steps)
        found = difference_of_fits(make, arguments, data, rows=rows, steps=steps, size=size)
    says = ("The terms of", "does not train as the full batch")
    told = [str(w.message) for w in caught if any(text in str(w.message) for text in says)]
    if not told:
        assert found <= max(LIMIT, 20 * order), order
