"""`GradientNoiseScale` on any backend: estimates are those of the formula, in float32."""

import contextlib

import keras
import numpy as np
import pytest
from case import BACKEND
from helpers import assert_changed, dense_data, dense_model, seeded, told
from keras import ops
from noise import (
    DECAY,
    SETTINGS,
    TwoNetworks,
    compiled_for_weights,
    fit,
    linear_model,
    measure_two_networks,
    measured_by_numpy,
    nonlinear_model,
    normal_rows,
    weighted_data,
    windows_of,
)
from own_train_steps import Differentiates

from ga_model import GradientNoiseScale, accumulate

every_setting = pytest.mark.parametrize("name", SETTINGS)


@every_setting
def test_the_estimates_are_unbiased(name):
    x, trace, square = normal_rows(2_405)
    batch_size = 10 if name == "size" else 8
    noise = GradientNoiseScale(0.99999)
    history = fit(linear_model(settings=SETTINGS[name]), x, noise, batch_size=batch_size)
    assert noise.trace_of_covariance == pytest.approx(trace, rel=0.05)
    assert noise.squared_gradient_norm == pytest.approx(square, rel=0.05)
    window = batch_size * SETTINGS[name].get("accumulation_steps", 1)
    assert noise.batch_size == pytest.approx(window, rel=0.02)
    assert history["gradient_noise_scale"] == [noise.noise_scale]


@pytest.mark.parametrize("scaling", ["factor", "dynamic"])
@pytest.mark.parametrize("name", ["steps", "size"])
def test_the_scale_of_the_loss_cancels(scaling, name):
    x, _, _ = normal_rows(160)

    def make(scaling):
        inner = keras.optimizers.SGD(0.01)
        return {
            "factor": keras.optimizers.SGD(0.01, loss_scale_factor=8.0),
            "dynamic": keras.optimizers.LossScaleOptimizer(
                inner, initial_scale=2.0**10, dynamic_growth_steps=5
            ),
            None: keras.optimizers.SGD(0.01),
        }[scaling]

    def measure(scaling):
        noise = GradientNoiseScale()
        fit(linear_model(make(scaling), settings=SETTINGS[name]), x, noise)
        return noise.noise_scales["optimizer"].averages

    np.testing.assert_allclose(measure(scaling), measure(None), rtol=1e-4)


def test_it_goes_on_in_the_next_fit_and_another_one_starts_anew():
    x, _, _ = normal_rows(128)
    model, noise = linear_model(settings=SETTINGS["size"]), GradientNoiseScale(0.9)
    fit(model, x[:64], noise)
    first = noise.noise_scales
    fit(model, x[64:], noise)
    whole, again = GradientNoiseScale(0.9), GradientNoiseScale(0.9)
    fit(model, x, whole)
    assert whole.noise_scales["optimizer"].averages.num_windows == 16
    assert noise.noise_scales == whole.noise_scales
    fit(model, x[:64], again)
    assert again.noise_scales == first != whole.noise_scales
    assert "gradient noise scale is about" in str(whole)


def test_windows_of_one_microbatch_are_left_out():
    x, _, _ = normal_rows(11)
    noise = GradientNoiseScale()
    fit(linear_model(settings=SETTINGS["size"]), x, noise)  # 3 + 3 + 2, and 3
    assert noise.noise_scales["optimizer"].averages.num_windows == 1
    assert noise.batch_size == 8
    model = linear_model(settings={"microbatch_size": 8})
    with pytest.warns(UserWarning, match="No gradient noise scale was measured") as caught:
        history = fit(model, x[:8], noise, epochs=3)["gradient_noise_scale"]
    assert len([text for text in told(caught) if "No gradient noise" in text]) == 1
    assert np.isnan([*history, noise.noise_scale]).tolist() == [True] * 4
    assert "nothing is known" in str(noise)


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("name", ["size", "both", "steps"])  # the first has some without weight
def test_the_estimates_are_those_of_the_formula(name, nan):
    """Ragged parts, a ragged batch, a partial window, weights of zero, a microbatch with NaN."""
    ids, y, weights = weighted_data(46)
    if nan:
        y[9] = np.nan
    model = compiled_for_weights(
        accumulate(seeded(nonlinear_model), **SETTINGS[name]), skip_nonfinite=nan
    )
    noise = GradientNoiseScale(DECAY)
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [noise]}
    skipped = pytest.warns(UserWarning, match="with NaN or Inf in their gradients were skipped")
    with skipped if nan else contextlib.nullcontext():
        model.fit(ids, y, sample_weight=weights, **arguments)
    windows = windows_of(46, 8, **SETTINGS[name])
    bad = [part for window in windows for part in window if part.start <= 9 < part.stop]
    reference = compiled_for_weights(seeded(nonlinear_model))
    expected = measured_by_numpy(reference, (ids, y, weights), windows, left_out=bad if nan else ())
    (scale,) = noise.noise_scales.values()
    assert expected[3] >= len(windows) - 1
    np.testing.assert_allclose(scale.averages, expected, rtol=1e-4)


@every_setting
def test_weights_are_those_of_training_without_it(name):
    """But for rounding: where PyTorch sums in `.grad`, it then sums in buffers."""
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


class OfTwo(TwoNetworks, Differentiates):
    def microbatch_weight(self, x, y=None, sample_weight=None):
        return ops.shape(x)[0]

    def step(self, x, y):
        first, second = self.first.trainable_variables, self.second.trainable_variables
        loss, of_first = self.gradients(lambda: ops.mean(self.first(x)), first)
        of_first = [ops.copy(gradient) for gradient in of_first]
        _, of_second = self.gradients(lambda: 3.0 * ops.mean(self.second(x)), second)
        self.update(of_first, first, self.first_optimizer)
        self.update(of_second, second, self.second_optimizer)
        return {"first": loss}


@pytest.mark.gate
@pytest.mark.skipif(BACKEND == "jax", reason="a step has one optimizer there")
@every_setting
def test_several_optimizers_each_have_their_own(name, capsys):
    noise = measure_two_networks(OfTwo(), name, verbose=True)
    words = "\n".join(f"{key}: {scale}" for key, scale in noise.noise_scales.items())
    assert capsys.readouterr().out == f"{words}\n"


@pytest.mark.gate
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
