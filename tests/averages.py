"""Running averages of BatchNormalization after training off TensorFlow, and how they differ."""

import keras
import numpy as np
from helpers import dense_data, relative_difference, seeded
from keras import layers, ops

from ga_model import accumulate

# Settings, and samples per batch where an update takes 12.
SETTINGS = {
    "both": ({"accumulation_steps": 3, "microbatch_size": 3}, 4),
    "split": ({"microbatch_size": 5}, 12),
    "windows": ({"accumulation_steps": 3}, 4),
    "full batch": ({"microbatch_size": 5, "loss_over": "batch"}, 12),
    "full batches": ({"accumulation_steps": 3, "microbatch_size": 3, "loss_over": "batch"}, 4),
    "skips": ({"microbatch_size": 5, "skip_nonfinite": True}, 12),
}


def averages(model):
    normal = [p for p in model._flatten_layers() if isinstance(p, layers.BatchNormalization)]
    return [np.array(ops.convert_to_numpy(v)) for p in normal for v in p.non_trainable_variables]


def fit(make, settings, rows, data=None, epochs=2):
    model = accumulate(seeded(make), **settings)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    before = averages(model)
    data = dense_data(31) if data is None else data
    model.fit(*data, batch_size=rows, epochs=epochs, shuffle=False, verbose=0)
    return averages(model), before


def difference(make, settings, data=None):
    found, start = fit(make, *SETTINGS[settings], data)
    expected, _ = fit(make, {}, 12, data)
    return relative_difference(found, expected, start)


def first():
    """Normalizes its inputs, and what frozen layers make of them."""
    frozen = layers.Dense(3, activation="tanh", trainable=False)
    inputs = keras.Input((4,))
    parts = [layers.BatchNormalization()(inputs)]
    parts += [layers.BatchNormalization(momentum=0.7)(frozen(inputs))]
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(parts)))
