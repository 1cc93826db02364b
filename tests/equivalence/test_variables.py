"""Float8 layers, whose scales are the largest values of a window."""

import contextlib

import keras
import numpy as np
import pytest
from helpers import assert_close, dense_data, seeded
from training import train_pair
from zoo import float8

from ga_model import accumulate

WAYS = {
    "accumulation_steps": {"rows": 4, "steps": 3},
    "microbatch_size": {"rows": 12, "steps": 1, "size": 4},
    "both": {"rows": 4, "steps": 3, "size": 2},
}


def test_float8_layers_remember_a_batch_without_weight_as_plain_keras_does():
    x, y = dense_data(12)
    trained = []
    for size in (None, 4):
        model = accumulate(seeded(float8), microbatch_size=size)
        model.compile("sgd", keras.losses.MeanSquaredError("mean_with_sample_weight"))
        model.fit(x, y, sample_weight=np.zeros(12), batch_size=12, verbose=0, shuffle=False)
        trained.append(model.get_weights())
    for a, b in zip(*trained, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("way", WAYS)
def test_float8_layers_take_the_windows_largest_values(way, optimizer):
    model, reference, start = train_pair(
        float8, lambda: {"optimizer": optimizer, "loss": "mse"}, dense_data(36), **WAYS[way]
    )
    overwritten = [v for v in model.trainable_variables if v.overwrite_with_gradient]
    assert len(overwritten) == 12
    assert_close(model, reference, start)


@pytest.mark.parametrize("rows", [40, 36])
def test_float8_layers_are_told_of_in_partial_windows(rows):
    model = accumulate(seeded(float8), accumulation_steps=3)
    model.compile("sgd", "mse")
    partial = pytest.warns(UserWarning, match=r"Float8 layers remember how large .*scale.*partial")
    with partial if rows % 12 else contextlib.nullcontext():
        model.fit(*dense_data(rows), batch_size=4, verbose=0)
