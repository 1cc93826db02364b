"""Half precision: float32 sums, one finite check per window, and the full batch's range."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import set_dtype
from helpers import (
    TOLERANCE,
    dense_data,
    dense_model,
    num_updates,
    seeded,
)
from training import difference_of_fits

from ga_model import accumulate


def train_pair(make, optimizer, rows=64, steps=8, epochs=4):
    x, y = (a.astype("float32") for a in dense_data(rows))
    trained = []
    for wrap, batch in ((lambda m: m, rows // 2), (accumulate, rows // 2 // steps)):
        model = seeded(make)
        if wrap is accumulate:
            accumulate(model, accumulation_steps=steps)
        model.compile(optimizer(), "mse")
        start = model.get_weights()
        model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
        trained.append(model)
    return *trained, start


@pytest.mark.parametrize("power", [14, 17, 20, 24])
def test_an_overflow_skips_one_window_whole_and_halves_the_scale_once(power):
    """And there are no more overflows than with the full batch, whose rows count as much.

    There may be one less: the full batch adds its rows up in float16, windows in float32.
    """
    set_dtype("mixed_float16")

    def optimizer():
        inner = keras.optimizers.SGD(0.1)
        return keras.optimizers.LossScaleOptimizer(
            inner, initial_scale=2.0**power, dynamic_growth_steps=1000
        )

    reference, model, start = train_pair(dense_model, optimizer)
    skipped, expected = (8 - num_updates(m.optimizer) for m in (model, reference))
    assert skipped in (expected, expected - 1)
    assert model.optimizer.dynamic_scale.numpy() == 2.0 ** (power - skipped)
    for w in model.get_weights():
        assert np.all(np.isfinite(w))
    if skipped == expected:
        for w, r, s in zip(model.get_weights(), reference.get_weights(), start, strict=True):
            np.testing.assert_allclose(w, r, rtol=0, atol=0.01 * np.abs(r - s).max())


def test_a_light_first_microbatch_does_not_push_the_others_out_of_range():
    set_dtype("mixed_float16")
    x, y = dense_data(64)
    weights = np.where(np.arange(64) % 32 < 4, 1 / 1024, 1.0)  # the first of 8 microbatches
    updates = []
    for rows, steps in ((32, 1), (4, 8)):
        model = accumulate(seeded(dense_model), accumulation_steps=steps)
        inner = keras.optimizers.SGD(0.1)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**12)
        model.compile(optimizer, keras.losses.MeanSquaredError("mean_with_sample_weight"))
        model.fit(x, y, sample_weight=weights, batch_size=rows, epochs=4, shuffle=False, verbose=0)
        updates.append((num_updates(optimizer), float(optimizer.dynamic_scale.numpy())))
    assert updates[0] == updates[1] == (8, 2.0**12)


class AppliesGradientsAlone(keras.Sequential):
    """Leaves it to the optimizer which variables the gradients are of."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.parametrize("settings", [{"steps": 2}, {"steps": 1, "size": 3}], ids=str)
def test_a_loss_scale_optimizer_knows_its_variables(settings):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)

    difference = difference_of_fits(
        lambda: AppliesGradientsAlone([keras.Input((4,)), *dense_model().layers]),
        lambda: {"optimizer": optimizer(), "loss": None},
        dense_data(24),
        rows=6,
        **settings,
    )
    assert difference <= TOLERANCE["float32"]
