"""Logs of windows on PyTorch: those of plain Keras on the full batch."""

import warnings

import keras
import numpy as np
import pytest
from helpers import dense_data, relative_difference, seeded
from keras import ops
from pairs import TOLERANCE, torch

from ga_model import accumulate

SAMPLES, ROWS, STEPS = 22, 2, 3  # of a window: 6, and the last one of an epoch has 4
POSITIONS = 4


def tokens(seed=3):
    """Ids of which some are masked: of the first batch none, of the third all but one."""
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 12, (SAMPLES, POSITIONS)).astype("int32")
    x[2:, 1:] *= rng.integers(0, 2, (SAMPLES - 2, POSITIONS - 1)).astype("int32")
    x[4:6, :] = 0
    x[4, 0] = 1
    return x, rng.normal(size=(SAMPLES, POSITIONS, 2)).astype("float32")


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


class TracksItsInputs(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="tracked")
        self.sum = keras.metrics.Sum(name="summed")

    def call(self, x):
        self.tracker.update_state(ops.mean(ops.square(x)))
        self.sum.update_state(ops.mean(ops.square(x)))
        return x


def tracking():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), TracksItsInputs()])


class Steps(keras.Model):
    """A step with trackers of its own, which logs numbers too."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.item = keras.metrics.Mean(name="item")
        self.chosen = keras.metrics.Mean(name="chosen")
        self.weighed = keras.metrics.Mean(name="weighed")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        chosen = (y > 0).to(y.dtype)
        self.zero_grad()
        loss = (chosen * (y - self(x)) ** 2).sum() / chosen.sum()
        loss.backward()
        rate = float(self.optimizer.learning_rate)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights])
        self.item.update_state(loss.item())
        self.chosen.update_state(loss)
        self.weighed.update_state(loss.detach(), sample_weight=x.shape[0])
        return {
            "now": loss.detach(),
            "float": loss.item(),
            "rate": rate,
            **{m.name: m.result() for m in (self.item, self.chosen, self.weighed)},
        }

    @property
    def metrics(self):
        return [self.item, self.chosen, self.weighed]


def steps():
    model = Steps()
    model(np.zeros((1, 4)))
    return model


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
    "steps": (steps, plain_data, dict),
    "sum": (regularized, plain_data, lambda: {"loss": summed()}),
    "weights": (dense, weighed, lambda: {"loss": weighed_mean(), "weighted_metrics": ["mae"]}),
    "layer": (tracking, plain_data, lambda: {"loss": "mse"}),
}
SETTINGS = {
    "windows": {"accumulation_steps": STEPS},
    "both": {"accumulation_steps": STEPS, "microbatch_size": 1},
    "skipping": {"accumulation_steps": STEPS, "skip_nonfinite": True},
}


class Logs(keras.callbacks.Callback):
    """Keeps the logs of all batches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, {name: float(value) for name, value in logs.items()}))


def trained(case, rows, settings):
    """Return weights, logs of the updates and of the epochs of a training without a warning."""
    make, data, arguments = CASES[case]
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


def difference(logs, expected):
    """Return the largest relative difference of two dicts of numbers, or lists of them."""
    assert logs.keys() == expected.keys()
    return max(np.max(np.abs(np.divide(logs[k], expected[k]) - 1)) for k in expected)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_logs_of_windows_are_those_of_the_full_batch(case, settings):
    start, *expected = trained(case, ROWS * STEPS, None)
    _, *found = trained(case, ROWS, SETTINGS[settings])
    assert relative_difference(found[0], expected[0], start) < 10 * TOLERANCE
    num_batches = found[1][-1][0] + 1
    ends = [logs for n, logs in found[1] if (n + 1) % STEPS == 0 or n + 1 == num_batches]
    for logs, (_, known) in zip(ends, expected[1], strict=True):
        assert difference(logs, known) < TOLERANCE
    assert difference(found[2], expected[2]) < TOLERANCE


def test_metrics_that_are_reset_within_a_window_begin_again():
    model = accumulate(seeded(tagger), accumulation_steps=STEPS)
    model.compile("sgd", "mse")
    x, y = tokens()
    batches = [(x[i : i + ROWS], y[i : i + ROWS]) for i in range(0, ROWS * STEPS, ROWS)]
    expected = float(model.test_on_batch(x[: ROWS * STEPS], y[: ROWS * STEPS]))
    for batch in batches:
        model.reset_metrics()
        loss = model.train_on_batch(*batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # of the window, and nothing twice


def test_microbatches_that_are_skipped_count_for_nothing():
    x, y = dense_data(ROWS * STEPS)
    y[:ROWS] = np.nan
    model = accumulate(seeded(dense), accumulation_steps=STEPS, skip_nonfinite=True)
    model.compile("sgd", "mse")
    expected = float(model.test_on_batch(x[ROWS:], y[ROWS:]))
    model.reset_metrics()
    warnings.filterwarnings("ignore", "Microbatches of")
    for i in range(0, ROWS * STEPS, ROWS):
        loss = model.train_on_batch(x[i : i + ROWS], y[i : i + ROWS])
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
