"""Reductions of losses, masked and weighted models, and terms that no one weight can serve."""

import keras
import numpy as np
from zoo import masked_data

REDUCTIONS = ["mean_with_sample_weight", "sum_over_batch_size", "mean", "sum"]

DIFFERENT_REDUCTIONS = [name for name in REDUCTIONS if name != "mean"]  # which is the second one


def sequence_model():
    return keras.Sequential(
        [
            keras.Input((5, 3)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )


def masked_sequence_model():
    return keras.Sequential([keras.Input((5, 3)), keras.layers.Masking(), *sequence_model().layers])


def sample_weights(kind, rows):
    generator = np.random.default_rng(5)
    if kind == "none":
        return ()
    shape = {"rows": (rows, 1), "positions": (rows, 5), "zeros": (rows, 1)}[kind]
    weights = generator.uniform(0.1, 3.0, size=shape).astype(keras.config.floatx())
    if kind == "zeros":
        weights[: rows // 3] = 0.0  # a whole microbatch that counts nothing, and more
    return (weights,)


def compile_with(reduction, **kwargs):
    def arguments():
        return {
            "optimizer": keras.optimizers.SGD(0.001 if reduction == "sum" else 0.05, momentum=0.9),
            "loss": keras.losses.MeanSquaredError(reduction=reduction),
            **kwargs,
        }

    return arguments


def two_masked_outputs():
    """Each output has the mask of its own input."""
    a, b = keras.Input((5, 3)), keras.Input((5, 3))
    masking = keras.layers.Masking()
    hidden = keras.layers.Dense(4, activation="tanh")
    outputs = [keras.layers.Dense(2, name=n)(hidden(masking(i))) for n, i in (("a", a), ("b", b))]
    return keras.Model([a, b], outputs)


def two_masked_data(rows):
    (a, y), (b, _) = masked_data(rows), masked_data(rows)
    return [a, b[::-1].copy()], [y, y[::-1].copy()]


def masked_with_activity_regularizer():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((5, 3)),
            layers.Masking(),
            layers.Dense(4, activation="tanh", activity_regularizer=keras.regularizers.L2(0.3)),
            layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.1)),
        ]
    )


def two_sequences():
    inputs = keras.Input((5, 3))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    return keras.Model(inputs, [keras.layers.Dense(2, name=name)(hidden) for name in "ab"])


def mixed(*reductions):
    return lambda: {
        "optimizer": keras.optimizers.SGD(0.005, momentum=0.9),
        "loss": [keras.losses.MeanSquaredError(reduction=reduction) for reduction in reductions],
        "loss_weights": [0.7, 1.9],
    }


def weighted_data(rows, kinds):
    x, y = masked_data(rows)
    generator = np.random.default_rng(9)
    weights = [generator.uniform(0.1, 3.0, size=(rows, kind)) for kind in kinds]
    return x, [y, -y], weights


def nothing_in_the_first_part(rows):
    x, y, weights = weighted_data(rows, (1, 5))
    weights[0][::12], weights[0][1::12] = 0.0, 0.0
    for start in range(0, rows, 12):
        weights[0][start : start + 5] = 0.0
    return x, y, weights


mean = "mean_with_sample_weight"


UNLIKE = {
    "two masks": (two_masked_outputs, mixed("mean", "mean"), two_masked_data),
    "two masks, sum": (two_masked_outputs, mixed("mean", "sum"), two_masked_data),
    "mask and activity": (masked_with_activity_regularizer, compile_with("mean"), masked_data),
    "mean and sum": (two_sequences, mixed("mean", "sum"), lambda n: weighted_data(n, (1, 1))),
    "two sample weights": (two_sequences, mixed(mean, mean), lambda n: weighted_data(n, (1, 5))),
    "a part that one leaves out": (two_sequences, mixed(mean, mean), nothing_in_the_first_part),
}
