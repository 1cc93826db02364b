"""`GradientNoiseScale` on any backend: estimates are those of the formula, in float32."""

import contextlib

import keras
import numpy as np
import pytest
from case import BACKEND, PRECISION
from conftest import set_dtype
from helpers import assert_changed, dense_data, scope, seeded, told
from keras import ops
from noise import (
    DECAY,
    FEATURES,
    SETTINGS,
    compiled_for_weights,
    fit,
    linear_model,
    measured_by_numpy,
    nonlinear_model,
    normal_rows,
    weighted_data,
    windows_of,
)
from own_train_steps import GANOfOneState
from training import compiled

from ga_model import AccumulatingModel, GradientNoiseScale, accumulate

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


# The first has microbatches without weight; then how it runs, for TensorFlow.
FORMULA = [(name, nan, {}) for nan in (False, True) for name in ("size", "both", "steps")]
if BACKEND == "tensorflow":
    FORMULA.insert(1, ("both", False, {"replicas": 2}))
    FORMULA += [("both", False, {how: True}) for how in ("run_eagerly", "jit_compile")]


@pytest.mark.parametrize(("name", "nan", "how"), FORMULA, ids=str)
def test_the_estimates_are_those_of_the_formula(name, nan, how):
    """Ragged parts, a ragged batch, a partial window, weights of zero, a microbatch with NaN."""
    set_dtype(PRECISION)
    ids, y, weights = weighted_data(46)
    if nan:
        y[9] = np.nan
    replicas = how.get("replicas", 1)
    how = {key: value for key, value in how.items() if key != "replicas"}
    with scope(replicas):
        model = accumulate(seeded(nonlinear_model), **SETTINGS[name])
        compiled_for_weights(model, skip_nonfinite=nan, **how)
    noise, size = GradientNoiseScale(DECAY), 8 if replicas == 1 else 12
    skipped = pytest.warns(UserWarning, match="with NaN or Inf in their gradients were skipped")
    with skipped if nan else contextlib.nullcontext():
        model.fit(ids, y, size, 2, 0, [noise], sample_weight=weights, shuffle=False)
    windows = windows_of(46, size, replicas=replicas, **SETTINGS[name])
    bad = [part for window in windows for part in window if part.start <= 9 < part.stop]
    reference, data = compiled_for_weights(seeded(nonlinear_model)), (ids, y, weights)
    expected = measured_by_numpy(reference, data, windows, epochs=2, left_out=bad if nan else ())
    (scale,) = noise.noise_scales.values()
    assert expected[3] >= 2 * len(windows) - 2
    rtol = {"float64": 1e-10, "float32": 1e-4}[PRECISION]
    np.testing.assert_allclose(scale.averages, expected, rtol=rtol)
    trace, norm = scale.averages[:2]
    assert noise.noise_scale == (trace / norm if norm > 0 else np.inf)


@every_setting
def test_weights_are_those_of_training_without_it(name):
    """But for rounding: where PyTorch sums in `.grad`, it then sums in buffers."""
    weights = []
    for callbacks in ([], [GradientNoiseScale()]):
        model = compiled(optimizer="adam", **SETTINGS[name])
        start = model.get_weights()
        model.fit(*dense_data(46), 8, 2, 0, callbacks, shuffle=False)
        weights.append(model.get_weights())
    assert_changed(weights[0], start)
    for with_it, without in zip(*weights, strict=True):
        np.testing.assert_allclose(with_it, without, rtol=1e-5, atol=1e-6)


class OfTwo(AccumulatingModel, GANOfOneState):
    """The second network's loss is three times the first one's."""

    def make(self):
        inputs, head = keras.Input((FEATURES,)), keras.layers.Dense
        self.discriminator, self.generator = (
            keras.Sequential([inputs, head(1, use_bias=False)]) for _ in range(2)
        )

    def loss_of_discriminator(self, x, y):
        return ops.mean(self.discriminator(x))

    def loss_of_generator(self, x, y):
        return 3.0 * ops.mean(self.generator(x))

    def microbatch_weight(self, x, y=None, sample_weight=None):
        return ops.shape(x)[0]


@pytest.mark.gate
@pytest.mark.skipif(BACKEND == "jax", reason="a step has one optimizer there")
@every_setting
def test_several_optimizers_each_have_their_own(name, capsys):
    (x, _, _), model = normal_rows(64), OfTwo()
    sgd = [keras.optimizers.SGD(0.1) for _ in range(2)]
    model.compile(sgd, **SETTINGS[name], loss_over="microbatch")
    noise, alone = GradientNoiseScale(verbose=True), GradientNoiseScale()
    history = fit(model, x, noise)
    fit(linear_model(settings=SETTINGS[name]), x, alone)
    expected = np.array([alone.trace_of_covariance, alone.squared_gradient_norm])
    scales = noise.noise_scales
    assert list(scales) == ["d_optimizer", "g_optimizer"]
    for number, (key, scale) in zip((1, 9), scales.items(), strict=True):
        np.testing.assert_allclose(scale.averages[:2], number * expected, rtol=1e-5)
        assert history[f"gradient_noise_scale_{key}"] == [scale.noise_scale]
    assert "gradient_noise_scale" not in history
    words = "\n".join(f"{key}: {scale}" for key, scale in scales.items())
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
