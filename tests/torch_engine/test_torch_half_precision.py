"""On PyTorch, samples that mix are told from rounding, also in half precision."""

import keras
import numpy as np
import pytest
from helpers import relative_difference
from keras import layers, ops
from training import train

WHOLE = "cannot be split into microbatches"


class Mix(layers.Layer):
    def call(self, x):
        return x - 0.1 * ops.mean(x, axis=0, keepdims=True)


def mixing(policy):
    inputs = keras.Input((6,))
    parts = [Mix(), layers.Dense(8, dtype=policy), layers.Dense(4, dtype=policy)]
    return keras.Model(inputs, keras.Sequential(parts)(inputs))


def separate(policy):
    inputs = keras.Input((6,))
    parts = [layers.Dense(32, activation="relu", dtype=policy) for _ in range(12)]
    return keras.Model(inputs, keras.Sequential([*parts, layers.Dense(4)])(inputs))


def data():
    generator = np.random.default_rng(0)
    return generator.normal(size=(32, 6)), generator.normal(size=(32, 4))


def compiled():
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}


@pytest.mark.every_case
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_samples_that_mix_a_little_are_not_split(policy, recwarn):
    def make():
        return mixing(policy)

    reference, start = train(make, compiled, data(), rows=32)
    model, _ = train(make, compiled, data(), rows=32, microbatch_size=8)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= (1e-2 if policy == "mixed_bfloat16" else 2e-3)
    assert any(WHOLE in str(warning.message) for warning in recwarn)


@pytest.mark.every_case
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_what_rounds_otherwise_is_split(policy):
    train(lambda: separate(policy), compiled, data(), rows=32, microbatch_size=7)
