"""`GradientNoiseScale` on TensorFlow: what its callbacks and words do, and ways to run."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Counting, dense_data
from noise import SETTINGS, fit, linear_model, normal_rows
from training import compiled

from ga_model import AccumulationScheduler, GradientNoiseScale, check_equivalence
from ga_model._noise_scale import NoiseScale
from ga_model.core.noise import Averages

# Updates that are skipped.


@pytest.mark.gate
@pytest.mark.parametrize("name", ["steps", "size"])
def test_updates_that_overflow_are_left_out(name):
    x, trace, _ = normal_rows(800)
    x *= 16.0
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=2.0**126, dynamic_growth_steps=5
    )
    noise = GradientNoiseScale(0.99999)
    fit(linear_model(optimizer, settings=SETTINGS[name]), x, noise)
    num_windows = math.ceil(100 / SETTINGS[name].get("accumulation_steps", 1))
    assert 0 < noise.noise_scales["optimizer"].averages.num_windows < num_windows
    assert noise.trace_of_covariance == pytest.approx(256 * trace, rel=0.1)


# It changes nothing else.


def counting():
    model = compiled(Counting, accumulation_steps=3)
    model(np.ones((1, 4)))
    model.optimizer.build(model.trainable_variables)  # TensorFlow traces twice where one is made
    return model, tf.data.Dataset.from_tensor_slices(dense_data(30)).batch(4)


@pytest.mark.gate
def test_switching_it_off_and_on_traces_nothing_again():
    model, data = counting()
    traces = []
    for callbacks in ([GradientNoiseScale()], [], [GradientNoiseScale(0.5)], []):
        model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        traces.append(model.traces)
    assert traces[0] < traces[1]
    assert traces[1:] == 3 * [traces[1]]


def test_a_fit_that_fails_leaves_it_off():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    x, _, _ = normal_rows(64)
    model, noise = linear_model(settings=SETTINGS["size"]), GradientNoiseScale()
    with pytest.raises(KeyboardInterrupt):
        fit(model, x, noise, Fails())
    assert model._accumulation.measured_noise is None
    seen = noise.noise_scales
    assert seen["optimizer"].averages.num_windows == 6
    fit(model, x)
    assert noise.noise_scales == seen


# What it shows.


def test_a_schedule_may_begin_without_a_second_microbatch():
    x, _, _ = normal_rows(32)
    model, noise = linear_model(settings={}), GradientNoiseScale()
    scheduler = AccumulationScheduler({0: 1, 1: 2})
    history = fit(model, x, scheduler, noise, epochs=2)["gradient_noise_scale"]  # without a warning
    assert math.isnan(history[0])
    assert history[1] == noise.noise_scale > 0
    model.accumulation_steps = 1
    with pytest.raises(ValueError, match="at least two microbatches per window"):
        fit(model, x, GradientNoiseScale())  # the schedule is forgotten


@pytest.mark.gate
def test_a_check_in_the_middle_leaves_it_on():
    x, y = dense_data(24)

    class Checks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            check_equivalence(self.model, x, y, batch_size=8, microbatch_size=4)

    measured = []
    for callbacks in ([], [Checks()]):
        model = compiled(microbatch_size=4)
        noise = GradientNoiseScale()
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[noise, *callbacks])
        (scale,) = noise.noise_scales.values()
        measured.append(scale.averages.num_windows)
    assert measured == [9, 9]


def scale_of(*averages, unit="rows"):
    return NoiseScale(Averages(*averages), 0.99, unit)


def words(noise_scale, batch_size, number=1000, **unit):
    return str(scale_of(noise_scale, 1.0, batch_size, number, **unit))


def test_the_words_follow_from_the_paper():
    """Updates needed: 1 + B_noise / B times the least; rows: 1 + B / B_noise times the least."""
    text = words(1896.0, 128.0)
    assert text == (
        "The gradient noise scale is about 1,900 rows (mean of about the last 100 updates). "
        "A window has 128: it needs 15.8 times the fewest updates possible and 1.07 times the "
        "fewest rows. Twice the window would take 47 % fewer updates and 6 % more rows; half of it "
        "94 % more updates and 3 % fewer rows, each with a learning rate that fits. "
        "A larger batch pays."
    )
    right = "The batch is about right"
    verdicts = {257: "A larger batch pays.", 255: right, 65: right, 63: "A smaller batch pays"}
    for noise_scale, verdict in verdicts.items():
        assert verdict in words(noise_scale, 128.0), noise_scale
    assert "(mean of about the last 7 updates)" in words(9.0, 8.0, number=7)
    assert "(of one update)" in words(9.0, 8.0, number=1)
    assert "fewest tokens" in words(9.0, 8.0, unit="tokens")


def test_the_words_hold_at_extremes():
    for norm in (-1.25e-5, 0.0):
        scale = scale_of(3.0, norm, 128.0, 1000)
        assert scale.noise_scale == math.inf
        assert "The noise hides the gradient" in str(scale)
        assert "larger windows" in str(scale)
    assert scale_of(-1.0, 2.0, 128.0, 3).noise_scale == 0.0
    assert "A window has 1,024:" in words(100.0, 1024.0)
    assert "more than 1,000,000,000 rows" in words(1e25, 128.0)
    for scale in (words(-1.0, 128.0), words(1e-6, 128.0), scale_of(1e-300, 1e300, 128.0, 3)):
        assert "has no measurable noise" in str(scale)
    for number, is_said in {1: True, 9: True, 100: False}.items():
        assert ("may be chance" in str(scale_of(3.0, -1.0, 128.0, number))) == is_said
