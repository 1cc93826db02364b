"""Models, data and metrics whose logs are compared with those of the full batch, on any backend."""

import warnings

import keras
import numpy as np
from helpers import LIMIT, dense_data, relative_difference, seeded
from keras import ops

from ga_model import accumulate

SAMPLES, ROWS, STEPS = 22, 2, 3  # of a window: 6, and the last one of an epoch has 4
POSITIONS = 4
SETTINGS = {
    "windows": {"accumulation_steps": STEPS},
    "both": {"accumulation_steps": STEPS, "microbatch_size": 1},
    "skipping": {"accumulation_steps": STEPS, "skip_nonfinite": True},
}


def tokens(seed=3):
    """Ids of which some are masked: of the first batch none, of the third all but one."""
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 12, (SAMPLES, POSITIONS)).astype("int32")
    x[2:, 1:] *= rng.integers(0, 2, (SAMPLES - 2, POSITIONS - 1)).astype("int32")
    x[4:6, :] = 0
    x[4, 0] = 1
    return x, rng.normal(size=(SAMPLES, POSITIONS, 2)).astype(keras.config.floatx())


def tagger():
    return keras.Sequential(
        [
            keras.Input((POSITIONS,), dtype="int32"),
            keras.layers.Embedding(12, 4, mask_zero=True),
            keras.layers.Dense(2),
        ]
    )


def two_taggers():
    ids = keras.Input((POSITIONS,), dtype="int32")
    vectors = keras.layers.Embedding(12, 4, mask_zero=True)(ids)
    dense = keras.layers.Dense(2, name="each")(vectors)
    mean = keras.layers.Dense(2, name="all")(ops.mean(vectors, axis=1))
    return keras.Model(ids, {"each": dense, "all": mean})


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def regularized():
    layers = [keras.Input((4,)), keras.layers.Dense(2, kernel_regularizer="l2")]
    return keras.Sequential(layers)


class TracksTwice(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="tracked")
        self.sum = keras.metrics.Sum(name="summed")

    def call(self, x):
        self.tracker.update_state(ops.mean(ops.square(x)))
        self.sum.update_state(ops.mean(ops.square(x)))
        return x


def tracking_twice():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), TracksTwice()])


def plain_data():
    return dense_data(SAMPLES)


def weighed():
    x, y = dense_data(SAMPLES)
    return x, y, np.linspace(0.1, 3, SAMPLES)


def weighed_mean():
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def summed():
    return keras.losses.MeanSquaredError(reduction="sum")


CASES = {
    "mask": (tagger, tokens, lambda: {"loss": "mse", "metrics": ["mae"]}),
    "outputs": (
        two_taggers,
        lambda: (tokens()[0], {"each": tokens(4)[1], "all": tokens(5)[1][:, 0]}),
        lambda: {
            "loss": {"each": summed(), "all": summed()},
            "loss_weights": {"all": 0.5, "each": 1},
        },
    ),
    "sum": (regularized, plain_data, lambda: {"loss": summed()}),
    "weights": (dense, weighed, lambda: {"loss": weighed_mean(), "weighted_metrics": ["mae"]}),
    "layer": (tracking_twice, plain_data, lambda: {"loss": "mse"}),
}


class Logs(keras.callbacks.Callback):
    """Keeps the logs of all batches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, {name: float(value) for name, value in logs.items()}))


def of_updates(seen):
    """Return the logs of batches that fill a window, or end an epoch."""
    num_batches = seen[-1][0] + 1
    return [logs for n, logs in seen if (n + 1) % STEPS == 0 or n + 1 == num_batches]


def trained(make, data, arguments, rows, settings):
    """Return weights, logs of batches and of epochs of a training without a warning."""
    model = seeded(make)
    start = model.get_weights()
    if settings is not None:
        model = accumulate(model, **settings)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.9)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), **arguments())
    logs = Logs()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        x, y, weights = (*data(), None)[:3]
        fit = {"batch_size": rows, "shuffle": False, "callbacks": [logs], "verbose": 0}
        history = model.fit(x, y, sample_weight=weights, epochs=2, **fit).history
    return start, model.get_weights(), logs.seen, history


def check(case, settings):
    """Compare logs after each update with those of the full batch, in float32."""
    start, *expected = trained(*case, ROWS * STEPS, None)
    _, *found = trained(*case, ROWS, SETTINGS[settings])
    assert relative_difference(found[0], expected[0], start) < 10 * LIMIT
    for logs, (_, known) in zip(of_updates(found[1]), expected[1], strict=True):
        assert difference(logs, known) < LIMIT
    assert difference(found[2], expected[2]) < LIMIT


def difference(logs, expected):
    """Return the largest relative difference of two dicts of numbers, or lists of them."""
    assert logs.keys() == expected.keys()
    return max(np.max(np.abs(np.divide(logs[k], expected[k]) - 1)) for k in expected)
