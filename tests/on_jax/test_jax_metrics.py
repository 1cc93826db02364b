"""On JAX, logs are those of the full batch: metrics of one's own are read, and told of."""

import warnings

import keras
import pytest
from helpers import dense_data, dense_model
from keras import ops
from training import assert_equal_logs, train

WAYS = {
    "both": {"accumulation_steps": 3, "microbatch_size": 3},
    "steps": {"accumulation_steps": 3},
    "size": {"microbatch_size": 5},
}


def mean(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def total(y_true, y_pred):
    return ops.sum(ops.abs(y_true - y_pred))


def per_sample(y_true, y_pred):
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


class Sums(keras.metrics.Metric):
    """Adds up what it gets, and counts samples."""

    def __init__(self, name="sums"):
        super().__init__(name=name)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(self.total + ops.sum(ops.square(y_true - y_pred)))
        self.count.assign(self.count + ops.sum(ops.ones_like(y_true[:, 0])))

    def result(self):
        return self.total / self.count


def root(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


class Largest(Sums):
    def __init__(self):
        super().__init__("largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(ops.maximum(self.total, ops.max(y_pred)))
        self.count.assign(1.0)


class Decays(Sums):
    def __init__(self):
        super().__init__("decays")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(0.9 * self.total + ops.sum(y_pred))
        self.count.assign(1.0)


def compile_args(*metrics):
    return lambda: {
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": "mse",
        "metrics": [m() if isinstance(m, type) else m for m in metrics],
    }


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
def test_metrics_that_add_up_are_exact_without_a_word(way):
    arguments = compile_args(mean, total, per_sample, Sums, Largest, "mae")
    reference, _ = train(dense_model, arguments, dense_data(24), rows=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        rows = 12 if way == "size" else 4
        model, _ = train(dense_model, arguments, dense_data(24), rows=rows, **WAYS[way])
    assert_equal_logs(model, reference)


@pytest.mark.every_case
@pytest.mark.parametrize("metric", [root, Decays])
def test_others_get_the_full_batch_or_are_told_of(metric):
    reference, _ = train(dense_model, compile_args(metric), dense_data(24), rows=12)
    model, _ = train(dense_model, compile_args(metric), dense_data(24), rows=12, microbatch_size=5)
    assert_equal_logs(model, reference)
    name = metric().name if isinstance(metric, type) else metric.__name__
    with pytest.warns(UserWarning, match=f"the metric '{name}' differs"):
        train(dense_model, compile_args(metric), dense_data(24), rows=4, accumulation_steps=3)
