"""Cases about metrics and logs of the user's own: of samples, or of whole batches."""

import dataclasses

import keras
import numpy as np
from case import ALL, BUT_LOGS, LOGGED, Case, Warns, sgd
from helpers import dense_data, dense_model
from keras import layers, ops


def dice(y, z):
    return 2 * ops.sum(y * z) / (ops.sum(y * y) + ops.sum(z * z))


def mean_error(y, z):
    return ops.mean(ops.abs(y - z))


def matches(y, z):
    """The share of samples whose own target is nearest."""
    nearest = ops.cast(ops.argmax(ops.matmul(z, ops.transpose(y)), axis=-1), "int32")
    return ops.mean(ops.cast(nearest == ops.arange(ops.shape(z)[0], dtype="int32"), z.dtype))


def errors(y, z):
    return ops.mean(ops.abs(y - z), axis=-1)


def number_above(y, z):
    return ops.sum(ops.cast(z > y, z.dtype))


def above_mean(y, z):
    chosen = ops.cast(y > 0, z.dtype)
    return ops.sum(chosen * ops.abs(y - z)) / ops.maximum(ops.sum(chosen), 1)


def mean_and_sum(y, z):
    return mean_error(y, z) + number_above(y, z)


class Own(keras.metrics.Metric):
    """Keeps numbers of some shapes, which a function of targets and outputs updates."""

    def __init__(self, update, result, *shapes):
        super().__init__(name="own")
        self.update, self.result_of = update, result
        self.kept = [
            self.add_weight(shape, "zeros", name=f"kept_{i}") for i, shape in enumerate(shapes)
        ]

    def update_state(self, y, z, sample_weight=None):
        self.update(y, z, *self.kept)

    def result(self):
        return self.result_of(*self.kept)


def dice_of_batches(y, z, total, number):
    total.assign_add(dice(y, z))
    number.assign_add(1.0)


def confusion(y, z, matrix):
    """Count in a way that puts samples together."""
    rows = ops.one_hot(ops.argmax(y, -1), 2), ops.one_hot(ops.argmax(z, -1), 2)
    matrix.assign_add(ops.matmul(ops.transpose(rows[0]), rows[1]))


def largest(y, z, most):
    """Keep a maximum, which adds up to nothing, and is that of all batches."""
    most.assign(ops.maximum(most, ops.max(ops.abs(y - z))))


def decaying(y, z, total):
    """Forget, by batches."""
    total.assign(0.9 * total + ops.sum(z))


class TracksItsInputs(layers.Layer):
    def __init__(self, function=ops.copy):
        super().__init__()
        self.function = function
        self.trackers = [keras.metrics.Mean(name="tracked"), keras.metrics.Sum(name="summed")]

    def call(self, x):
        for tracker in self.trackers:
            tracker.update_state(self.function(ops.mean(ops.square(x))))
        return x


def share_above(y, z):
    """A share through which no gradient goes."""
    chosen = ops.cast(y > 0, z.dtype)
    return ops.sum(chosen * ops.cast(z > y, z.dtype)) / ops.sum(chosen)


def root_error(y, z):
    return ops.sqrt(ops.mean(ops.square(y - z)))


# What adds up over samples, by functions that return a metric.
OF_SAMPLES = {
    "dice": lambda: dice,  # weighed by what it is divided by
    "a mean of some": lambda: above_mean,
    "a number": lambda: number_above,
    "a mean": lambda: mean_error,
    "a value per sample": lambda: errors,
    "a share": lambda: share_above,
    "a loss that compares": keras.losses.Dice,
    "a function that compares": lambda: keras.losses.dice,
    "a matrix": lambda: Own(confusion, ops.trace, (2, 2)),
    "the largest": lambda: Own(largest, ops.convert_to_tensor, ()),
    "a loss of Keras": keras.losses.MeanSquaredError,
    "of Keras": lambda: keras.metrics.R2Score(name="r2"),
}
OF_BATCHES = {
    "a mean of batches": lambda: Own(dice_of_batches, ops.divide, (), ()),
    "matches": lambda: matches,
    "a mean and a number": lambda: mean_and_sum,
    "a root": lambda: root_error,
    "a decaying sum": lambda: Own(decaying, ops.convert_to_tensor, ()),
}


def with_metric(make, expects):
    return Case(dense_model, compile=lambda: sgd(metrics=[make()])(), expects=expects)


def with_targets_above_zero(rows):
    x, y = dense_data(rows)
    return x, y + 3.0


def of_samples(name):
    case = with_metric(OF_SAMPLES[name], {})
    if "compares" not in name:
        return case
    # Keras divides by a sum and 1e-7, which a trial does not tell from the sum.
    return dataclasses.replace(case, precision="float32", data=with_targets_above_zero)


def beside_nan(make):
    """The correlation with a row of targets that are all alike is NaN."""

    def data(rows):
        x, y = dense_data(rows)
        return x, np.where(y > 0, 1.0, 0.0)[:, :1].repeat(2, axis=1).astype(y.dtype)

    def arguments():
        return sgd(metrics=[make(), keras.metrics.PearsonCorrelation()])()

    return Case(dense_model, data, arguments, compares=BUT_LOGS)


CASES = {name: of_samples(name) for name in OF_SAMPLES} | {
    name: with_metric(make, {"across": Warns(LOGGED, BUT_LOGS)})
    for name, make in OF_BATCHES.items()
}
CASES |= {
    "beside NaN": beside_nan(OF_SAMPLES["a number"]),
    "by label, beside NaN": beside_nan(lambda: keras.metrics.F1Score(threshold=0.5)),
}


def tracking(function):
    return lambda: keras.Sequential([*dense_model().layers, TracksItsInputs(function)])


# Keras's own step on JAX does not take metrics of layers.
NOT_JAX = ("tensorflow", "torch")
WHOLE = Warns("cannot be split", ALL)
CASES |= {
    "of a layer": Case(tracking(ops.copy), backends=NOT_JAX, expects={"recomputed": WHOLE}),
    "of a layer, a root": Case(
        tracking(ops.sqrt),
        backends=NOT_JAX,
        expects={"across": Warns(f"{LOGGED}|cannot be split", BUT_LOGS), "within": WHOLE},
    ),
}
CASES = {f"metric: {name}": case for name, case in CASES.items()}
