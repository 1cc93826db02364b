"""`GradientNoiseScale` on JAX: estimates are those of the formula, and nothing else changes.

There is no float64 in Keras on JAX, so they are compared in float32.
"""

import jax
import keras
import numpy as np
import pytest
from helpers import assert_changed, dense_data, dense_model, seeded
from noise import (
    DECAY,
    SETTINGS,
    averages_by_formula,
    nonlinear_model,
    weighted_data,
    windows_of,
)

from ga_model import GradientNoiseScale, accumulate

every_setting = pytest.mark.parametrize("name", SETTINGS)


def by_numpy(model, *args, **kwargs):
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    def loss_of(values, ids, y, weights):
        with keras.StatelessScope(list(zip(model.trainable_variables, values))):
            return loss(y, model(ids), weights)

    def gradient_of(*data):
        gradients = jax.grad(loss_of)([v.value for v in model.trainable_variables], *data)
        return np.concatenate([np.asarray(g, "float64").ravel() for g in gradients])

    return averages_by_formula(gradient_of, model.train_on_batch, *args, **kwargs)


def compiled(model, **arguments):
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.Adam(0.01), loss, **arguments)
    return model


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("name", ["size", "both", "steps"])  # the first has some without weight
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


@every_setting
def test_weights_are_those_of_training_without_it(name):
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
