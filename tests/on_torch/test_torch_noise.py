"""`GradientNoiseScale` on PyTorch: estimates are those of the formula, and nothing else changes.

There is no float64 in Keras on PyTorch, so they are compared in float32.
"""

import numpy as np
import pytest
from noise import (
    SETTINGS,
    TwoNetworks,
    fit,
    linear_model,
    measure_two_networks,
    normal_rows,
)
from torch_step import torch

from ga_model import GradientNoiseScale

every_setting = pytest.mark.parametrize("name", SETTINGS)


class OfTwo(TwoNetworks):
    def microbatch_weight(self, x, y=None, sample_weight=None):
        return len(x)

    def train_step(self, data):
        x, _ = data
        self.zero_grad()
        first, second = self.first(x).mean(), 3.0 * self.second(x).mean()
        (first + second).backward()
        with torch.no_grad():
            for network, optimizer in (
                (self.first, self.first_optimizer),
                (self.second, self.second_optimizer),
            ):
                weights = network.trainable_weights
                optimizer.apply([w.value.grad for w in weights], weights)
        return {"first": first}


@every_setting
def test_several_optimizers_each_have_their_own(name):
    measure_two_networks(OfTwo(), name, rel=1e-4)


def test_the_automatic_size_is_measured_as_well():
    x, _, _ = normal_rows(64)
    settings = {"microbatch_size": "auto", "accumulation_steps": 2}
    found, given = GradientNoiseScale(), GradientNoiseScale()
    model = linear_model(settings=settings)
    fit(model, x, found)
    fit(linear_model(settings={**settings, "microbatch_size": model.microbatch_size}), x, given)
    averages = [noise.noise_scales["optimizer"].averages for noise in (found, given)]
    np.testing.assert_allclose(*averages, rtol=1e-4)
    assert averages[0].num_windows == 4
