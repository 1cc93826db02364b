"""On PyTorch, running averages of BatchNormalization are those of the full batch, too.

Where the inputs of a layer do not depend on what another one has normalized, they equal those of
plain Keras on the full batch.
"""

import keras
import pytest
from averages import difference
from helpers import LIMIT
from keras import layers, ops
from torch_step import torch

pytestmark = pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")


class Twice(keras.Sequential):
    """Calls its first layer on two things, in a step of its own."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        first, *others = self.layers
        outputs = first(x, training=True) + first(x * 0.5 + 1, training=True)
        for layer in others:
            outputs = layer(outputs)
        loss = ops.sqrt(ops.mean(ops.square(outputs - y)))
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss}


def twice():
    return Twice([keras.Input((4,)), layers.BatchNormalization(momentum=0.8), layers.Dense(2)])


def test_a_layer_that_a_step_calls_twice_moves_twice():
    assert difference(twice, "split") <= LIMIT
