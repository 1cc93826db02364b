"""Half precision: float32 sums, one finite check per window, and the full batch's range."""

import keras
import numpy as np
import pytest
from conftest import set_dtype
from helpers import dense_data, dense_model, num_updates, seeded

from ga_model import accumulate

WAYS = {"windows": ({"accumulation_steps": 8}, 4), "split": ({"microbatch_size": 5}, 32)}


def trained(power, settings, rows, loss="mse", weights=None):
    """Return a model after 8 updates at most, and what it began with."""
    model = accumulate(seeded(dense_model), **settings)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**power, dynamic_growth_steps=1000
    )
    model.compile(optimizer, loss)
    start = model.get_weights()
    arguments = {"batch_size": rows, "epochs": 4, "shuffle": False, "verbose": 0}
    model.fit(*dense_data(64), sample_weight=weights, **arguments)
    return model, start


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("power", [14, 17, 20, 24])
def test_an_overflow_skips_one_window_whole_and_halves_the_scale_once(power, way):
    """And there are no more overflows than with the full batch, whose rows count as much.

    There may be one less: the full batch adds its rows up in float16, windows in float32.
    """
    set_dtype("mixed_float16")
    reference, start = trained(power, {}, 32)
    model, _ = trained(power, *WAYS[way])
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
    weights = np.where(np.arange(64) % 32 < 4, 1 / 1024, 1.0)  # the first of 8 microbatches
    loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
    for way in (({}, 32), WAYS["windows"]):
        optimizer = trained(12, *way, loss, weights)[0].optimizer
        assert (num_updates(optimizer), float(optimizer.dynamic_scale)) == (8, 2.0**12)
