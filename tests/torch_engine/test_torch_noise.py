"""`GradientNoiseScale` on PyTorch: estimates are those of the formula, and nothing else changes.

There is no float64 in Keras on PyTorch, so they are compared in float32.
"""

import keras
import numpy as np
import pytest
from helpers import assert_changed, dense_data, dense_model, seeded
from noise import (
    DECAY,
    SETTINGS,
    TwoNetworks,
    averages_by_formula,
    fit,
    linear_model,
    measure_two_networks,
    nonlinear_model,
    normal_rows,
    weighted_data,
    windows_of,
)
from torch_step import torch

from ga_model import GradientNoiseScale, accumulate

every_setting = pytest.mark.parametrize("name", SETTINGS)


def by_numpy(model, *args, **kwargs):
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    def gradient_of(ids, y, weights):
        model.zero_grad()
        loss(y, model(ids), weights).backward()
        gradients = [v.value.grad for v in model.trainable_variables]
        return np.concatenate([g.double().numpy().ravel() for g in gradients])

    return averages_by_formula(gradient_of, model.train_on_batch, *args, **kwargs)


def compiled(model, **arguments):
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.Adam(0.01), loss, **arguments)
    return model


@pytest.mark.every_case
@pytest.mark.parametrize("nan", [False, True])
@every_setting
def test_the_estimates_are_those_of_the_formula(name, nan):
    """Ragged parts, a ragged batch, a partial window, weights of zero, a microbatch with NaN."""
    ids, y, weights = weighted_data(46)
    if nan:
        y[9] = np.nan
    model = compiled(accumulate(seeded(nonlinear_model), **SETTINGS[name]), skip_nonfinite=nan)
    noise = GradientNoiseScale(DECAY)
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [noise]}
    with (
        pytest.warns(UserWarning, match="with NaN or Inf in their gradients were skipped")
        if nan
        else keras.name_scope("no")
    ):
        model.fit(ids, y, sample_weight=weights, **arguments)
    windows = windows_of(46, 8, **SETTINGS[name])
    bad = [part for window in windows for part in window if part.start <= 9 < part.stop]
    reference = compiled(seeded(nonlinear_model))
    expected = by_numpy(reference, (ids, y, weights), windows, left_out=bad if nan else ())
    (scale,) = noise.noise_scales.values()
    assert expected[3] >= len(windows) - 1
    np.testing.assert_allclose(scale.averages, expected, rtol=1e-4)


@pytest.mark.every_case
@every_setting
def test_weights_are_those_of_training_without_it(name):
    """But for rounding: the sum of a window is then in buffers, and not in `.grad`."""
    weights = []
    for callbacks in ([], [GradientNoiseScale()]):
        model = accumulate(seeded(dense_model), **SETTINGS[name])
        start = model.get_weights()
        model.compile("adam", "mse")
        model.fit(*dense_data(46), 8, 2, 0, callbacks, shuffle=False)
        weights.append(model.get_weights())
    assert_changed(weights[0], start)
    for with_it, without in zip(*weights, strict=True):
        np.testing.assert_allclose(with_it, without, rtol=1e-5, atol=1e-6)


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
