"""`GradientNoiseScale` off TensorFlow: estimates are those of the formula.

There is no float64 in Keras off TensorFlow, so they are compared in float32.
"""

import math

import keras
import numpy as np
import pytest
from helpers import dense_data, dense_model
from noise import (
    SETTINGS,
    fit,
    linear_model,
    measure_again,
    normal_rows,
)

from ga_model import GradientNoiseScale

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
    x, _, _ = normal_rows(480)

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
    _, _, whole = measure_again()
    assert "gradient noise scale is about" in str(whole)


def test_windows_of_one_microbatch_are_left_out():
    x, _, _ = normal_rows(11)
    noise = GradientNoiseScale()
    fit(linear_model(settings=SETTINGS["size"]), x, noise)  # 3 + 3 + 2, and 3
    assert noise.noise_scales["optimizer"].averages.num_windows == 1
    assert noise.batch_size == 8
    model = linear_model(settings={"microbatch_size": 8})
    with pytest.warns(UserWarning, match="No gradient noise scale was measured"):
        fit(model, x[:8], noise)
    assert math.isnan(noise.noise_scale)


def test_what_cannot_be_measured_is_refused():
    x, _, _ = normal_rows(16)
    with pytest.raises(ValueError, match="at least two microbatches per window"):
        fit(linear_model(settings={}), x, GradientNoiseScale())
    loss = keras.losses.MeanSquaredError(reduction="sum")
    with pytest.raises(ValueError, match="needs a loss that is a mean"):
        fit(linear_model(settings=SETTINGS["size"], loss=loss), x, GradientNoiseScale())
    plain = dense_model()
    plain.compile("sgd", "mse")
    with pytest.raises(TypeError, match="which does not"):
        plain.fit(*dense_data(8), verbose=0, callbacks=[GradientNoiseScale()])
