"""Data of which the noise of gradients is known, and the estimates by the formula, with NumPy."""

import itertools

import keras
import numpy as np
from gradients import gradients_of

from ga_model import accumulate

DECAY = 0.9
FEATURES = 20
SETTINGS = {
    "steps": {"accumulation_steps": 4},
    "size": {"microbatch_size": 3},
    "both": {"accumulation_steps": 2, "microbatch_size": 4},
}


class MeanOfOutputs(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred[:, 0]


def normal_rows(rows):
    """Return rows of a normal distribution, the trace of its covariance, and its mean's square."""
    generator = np.random.default_rng(5)
    mix = generator.normal(size=(FEATURES, FEATURES)) / FEATURES + np.eye(FEATURES)
    mean = generator.normal(size=FEATURES)
    x = generator.normal(size=(rows, FEATURES)) @ mix.T + mean
    return x.astype("float32"), np.trace(mix @ mix.T), mean @ mean


def nonlinear_model():
    first = keras.layers.Embedding(100, 4), keras.layers.Flatten()
    hidden = keras.layers.Dense(5, activation="tanh")
    ids = keras.Input((3,), dtype="int32")
    return keras.Sequential([ids, *first, hidden, keras.layers.Dense(2)])


def weighted_data(rows):
    """Return ids that repeat within a row, targets, and weights of which some are zero."""
    generator = np.random.default_rng(7)
    ids = generator.integers(0, 7, size=(rows, 3)).astype("int32")
    weights = generator.uniform(0.2, 3.0, size=rows)
    weights[:8] /= 4.0  # so that heavier microbatches come, and the unit of the weights grows
    weights[8:16:3] = 0.0
    weights[19:22] = weights[24:28] = 0.0  # all of a microbatch, between others and as the first
    return ids, generator.normal(size=(rows, 2)), weights


def windows_of(rows, batch_size, accumulation_steps=1, microbatch_size=None, replicas=1):
    """Return the microbatches of each window of an epoch, as ranges of rows."""
    batches = []
    for begin in range(0, rows, batch_size):
        end, microbatches = min(begin + batch_size, rows), []
        share = -(-(end - begin) // replicas)
        for first in range(begin, end, share):
            last = min(first + share, end)
            size = microbatch_size or last - first
            microbatches += [slice(i, min(i + size, last)) for i in range(first, last, size)]
        batches.append(microbatches)
    steps = range(0, len(batches), accumulation_steps)
    return [list(itertools.chain(*batches[i : i + accumulation_steps])) for i in steps]


def averages_by_formula(gradient_of, train, data, windows, epochs=1, left_out=()):
    """Return the averages by the formula.

    Args:
        gradient_of: returns the gradient of the mean loss of a microbatch, a vector.
        train: makes the update of a whole window.
        data: ids, targets and sample weights.
        windows: the microbatches of each, as ranges of rows.
    """
    ids, y, weights = data
    sums, number = np.zeros(4), 0
    for window in windows * epochs:
        squares, mean, count = 0.0, 0.0, 0
        window = [part for part in window if part not in left_out]
        total = sum(weights[part].sum() for part in window)
        for part in window:
            weight = weights[part].sum()
            if weight == 0:
                continue
            gradient = gradient_of(ids[part], y[part], weights[part])
            squares += weight * gradient @ gradient
            mean += weight / total * gradient
            count += 1
        rows = np.concatenate([np.arange(len(ids))[part] for part in window])
        train(ids[rows], y[rows], weights[rows])
        if count > 1:
            trace = (squares - total * mean @ mean) / (count - 1)
            values = np.array([trace, mean @ mean - trace / total, total, 1.0])
            sums = DECAY * sums + (1 - DECAY) * values
            number += 1
    return [*(sums[:3] / sums[3]), number]


def compiled_for_weights(model, **arguments):
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.Adam(0.01), loss, **arguments)
    return model


def measured_by_numpy(model, *args, **kwargs):
    """Train a plain model on whole windows, and return the averages by the formula."""

    def gradient_of(ids, y, weights):
        found = gradients_of(model, lambda: model.loss(y, model(ids), weights))
        return np.concatenate(
            [np.asarray(keras.ops.convert_to_numpy(g), "float64").ravel() for g in found]
        )

    return averages_by_formula(gradient_of, model.train_on_batch, *args, **kwargs)


def linear_model(optimizer="sgd", *, settings):
    head = keras.layers.Dense(1, use_bias=False)
    model = accumulate(keras.Sequential([keras.Input((FEATURES,)), head]), **settings)
    model.compile(optimizer, MeanOfOutputs())
    return model


def fit(model, x, *callbacks, batch_size=8, **arguments):
    y = np.zeros(len(x), "float32")
    arguments = {"shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, batch_size=batch_size, callbacks=list(callbacks), **arguments).history
