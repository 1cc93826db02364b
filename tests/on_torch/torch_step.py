"""A step of one's own on PyTorch."""

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("runs with KERAS_BACKEND=torch", allow_module_level=True)

import torch


class Step(keras.Sequential):
    """A step of one's own, that takes the gradient of `forward_loss`."""

    def forward_loss(self, x, y):
        return torch.square(self(x, training=True) - y).mean()

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.forward_loss(x, y)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights])
        return {"loss": loss.detach()}
