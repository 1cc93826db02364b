"""On PyTorch, samples that mix are told from rounding, also in half precision."""

import keras
import numpy as np
import pytest
from keras import layers
from training import train


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
def test_what_rounds_otherwise_is_split(policy):
    train(lambda: separate(policy), compiled, data(), rows=32, microbatch_size=7)
