"""Metrics that are given one number of a batch: exact on the full batch, or told of."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, dense_data, dense_model, relative_difference, seeded
from keras import ops
from logged import (
    Confusion,
    Largest,
    MeanOfDice,
    MeanOfMeans,
    TracksItsInputs,
    above_mean,
    dice,
    errors,
    matches,
    mean_and_sum,
    mean_error,
    number_above,
)

from ga_model import accumulate

WHAT = "A number that a metric or a log has of each batch"


def tracking():
    return keras.Sequential([*dense_model().layers, TracksItsInputs()])


def fit(make, metrics, rows, settings=None, **kwargs):
    model = seeded(make)
    start = model.get_weights()
    if settings is not None:
        model = accumulate(model, **settings)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=metrics(), **kwargs)
    x, y = dense_data(34)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        logs = model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0).history
    said = [str(warning.message) for warning in caught]
    return start, model.get_weights(), logs, said


def compare(make, metrics, rows, settings, **kwargs):
    """Return what differs in the logs, and what was said. Weights are equal."""
    start, weights, logs, said = fit(make, metrics, rows, settings, **kwargs)
    _, expected, known, _ = fit(make, metrics, 12, **kwargs)
    assert relative_difference(weights, expected, start) < TOLERANCE["float64"]
    assert logs.keys() == known.keys()
    return [n for n in known if not np.allclose(logs[n], known[n], rtol=1e-6, atol=0)], said


class Adds(keras.metrics.Metric):
    """The mean over batches of a number, or over samples if `count` counts them."""

    def __init__(self, number, count=lambda z: 1.0):
        super().__init__(name="adds")
        self.number, self.count = number, count
        self.sum = self.add_weight(initializer="zeros", name="sum")
        self.times = self.add_weight(initializer="zeros", name="times")

    def update_state(self, y, z, sample_weight=None):
        self.sum.assign_add(self.number(z))
        self.times.assign_add(self.count(z))

    def result(self):
        return self.sum / self.times


class MeanOfLargest(keras.metrics.Mean):
    def update_state(self, y, z, sample_weight=None):
        super().update_state(ops.max(z))


class OfLastBatch(Adds):
    def update_state(self, y, z, sample_weight=None):
        self.sum.assign(self.number(z))
        self.times.assign(1.0)


class Decaying(OfLastBatch):
    def update_state(self, y, z, sample_weight=None):
        self.sum.assign(0.9 * self.sum + self.number(z))
        self.times.assign(1.0)


class AddsAtOnce(Adds):
    def update_state(self, y, z, sample_weight=None):
        self.sum.assign(self.sum + ops.sum(z) + ops.sum(y))
        self.times.assign_add(ops.cast(ops.shape(z)[0], z.dtype))


OF_BATCHES = {
    "dice": lambda: dice,
    "matches": lambda: matches,
    "class": MeanOfDice,
    "means": MeanOfMeans,
    "loss": keras.losses.Dice,
    "several": lambda: mean_and_sum,
    "largest": lambda: Adds(ops.max),
    "batches": lambda: Adds(ops.sum),
    "mean of largest": MeanOfLargest,
    "last batch": lambda: OfLastBatch(ops.sum),
    "decaying": lambda: Decaying(ops.sum),
    "axis of samples": lambda: keras.metrics.CosineSimilarity(axis=0),
}
OF_SAMPLES = {
    "mean_error": lambda: mean_error,
    "sum": lambda: number_above,
    "masked": lambda: above_mean,
}


def given(name):
    return lambda: [OF_BATCHES[name]()]


@pytest.mark.parametrize("way", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=str)
@pytest.mark.parametrize("name", OF_BATCHES)
def test_with_a_microbatch_size_they_get_the_full_batch(name, way, float64):
    assert compare(dense_model, given(name), 12, {"microbatch_size": 5}, **way) == ([], [])


@pytest.mark.parametrize("name", OF_BATCHES)
def test_added_up_they_are_told_of(name, float64):
    settings = {"microbatch_size": 5, "loss_over": "microbatch"}
    (differing,), (said,) = compare(dense_model, given(name), 12, settings)
    assert WHAT in said
    assert repr(differing) in said
    assert 'set `loss_over="batch"`' in said
    places = {"dice": "'RealDiv'", "class": "'RealDiv'", "matches": "'MatMul'"}
    places |= {"means": "a mean over samples", "several": "terms that are divided by different"}
    places |= {"largest": "'Max'", "batches": "a count of batches"}
    places |= dict.fromkeys(["last batch", "decaying"], "a value that replaces that of the batch")
    assert places.get(name, "made by") in said


@pytest.mark.parametrize("name", OF_BATCHES)
def test_in_windows_they_are_told_of(name, float64):
    (differing,), (said,) = compare(dense_model, given(name), 4, {"accumulation_steps": 3})
    assert WHAT in said
    assert repr(differing) in said
    assert "instead of `accumulation_steps`" in said


ADDED_UP = [
    {"accumulation_steps": 3},
    {"microbatch_size": 5, "loss_over": "microbatch"},
    {"microbatch_size": 5},
]


@pytest.mark.parametrize("settings", ADDED_UP, ids=str)
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_numbers_that_are_means_or_sums_are_put_together(name, settings, float64):
    """In one pass: of the full batch a function would see all samples."""
    shapes = []

    def function(y, z):
        shapes.append(z.shape[0])
        return OF_SAMPLES[name]()(y, z)

    rows = 12 if "microbatch_size" in settings else 4
    assert compare(dense_model, lambda: [function], rows, settings) == ([], [])
    assert 12 not in shapes[: len(shapes) // 2]


@pytest.mark.parametrize("settings", ADDED_UP[:2], ids=str)
@pytest.mark.parametrize(
    "metric",
    [
        lambda: Adds(ops.sum, lambda z: ops.cast(ops.shape(z)[0], z.dtype)),
        Largest,
        lambda: AddsAtOnce(None),
    ],
    ids=["samples", "largest", "two sums"],
)
def test_metrics_that_count_samples_or_keep_the_largest_are_not(metric, settings, float64):
    rows = 12 if "microbatch_size" in settings else 4
    assert compare(dense_model, lambda: [metric()], rows, settings) == ([], [])


def test_a_count_of_batches_is_told_of(float64):
    _, (said,) = compare(dense_model, lambda: [Adds(ops.sum)], 4, {"accumulation_steps": 3})
    assert "a count of batches" in said


def test_a_metric_that_keeps_its_last_batch_is_told_of(float64):
    _, (said,) = compare(dense_model, lambda: [OfLastBatch(ops.sum)], 4, {"accumulation_steps": 3})
    assert "a value that replaces that of the batch before" in said


class OfOneClass(keras.metrics.AUC):
    """Passes on a part of what it gets."""

    def update_state(self, y, z, sample_weight=None):
        super().update_state(y[:, 1] > 0, ops.sigmoid(z[:, 1]))


class OfClasses(keras.metrics.MeanIoU):
    def update_state(self, y, z, sample_weight=None):
        super().update_state(ops.argmax(y, -1), ops.argmax(z, -1))


class F1(keras.metrics.Metric):
    """Follows from two of Keras's that it holds."""

    def __init__(self, center=ops.copy):
        super().__init__(name="f1")
        self.center = center
        self.parts = [keras.metrics.Precision(), keras.metrics.Recall()]

    def update_state(self, y, z, sample_weight=None):
        for part in self.parts:
            part.update_state(y > 0, ops.sigmoid(self.center(z)))

    def result(self):
        return self.parts[0].result() * self.parts[1].result()

    def reset_state(self):
        for part in self.parts:
            part.reset_state()


class Matrix(keras.metrics.Metric):
    """A confusion matrix by a function of TensorFlow."""

    def __init__(self):
        super().__init__(name="matrix")
        self.matrix = self.add_weight(shape=(2, 2), initializer="zeros", name="matrix")

    def update_state(self, y, z, sample_weight=None):
        classes = (tf.argmax(y, -1), tf.argmax(z, -1))
        self.matrix.assign_add(tf.math.confusion_matrix(*classes, 2, dtype=z.dtype))

    def result(self):
        return ops.trace(self.matrix)


@pytest.mark.parametrize("settings", [{"accumulation_steps": 3}, {"microbatch_size": 5}], ids=str)
def test_metrics_that_are_made_of_keras_own_are_not_told_of(settings, float64):
    rows = 12 if "microbatch_size" in settings else 4

    def metrics():
        return [OfOneClass(name="auc"), OfClasses(num_classes=2, name="iou"), F1(), Matrix()]

    assert compare(dense_model, metrics, rows, settings) == ([], [])


def test_what_a_metric_passes_on_to_keras_own_is_told_of(float64):
    def metrics():
        return [F1(lambda z: z - ops.mean(z, 0))]

    differing, said = compare(dense_model, metrics, 4, {"accumulation_steps": 3})
    assert differing == ["f1"]
    assert all(WHAT in text and "'Sub'" in text for text in said)
    assert said


class Holds(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="holds")
        self.mean = keras.metrics.Mean()

    def update_state(self, y, z, sample_weight=None):
        self.mean.update_state(ops.max(z))

    def result(self):
        return self.mean.result()


def test_a_metric_that_another_one_holds_is_told_of(float64):
    differing, (said,) = compare(dense_model, lambda: [Holds()], 4, {"accumulation_steps": 3})
    assert differing == ["holds"]
    assert WHAT in said


@pytest.mark.parametrize("settings", ADDED_UP, ids=str)
def test_what_a_layer_tracks_is_put_together(settings, float64):
    rows = 12 if "microbatch_size" in settings else 4
    assert compare(tracking, list, rows, settings) == ([], [])


def test_what_a_layer_tracks_is_told_of(float64):
    """The full batch, with all activations of the layers around it, is too much for a log."""

    def model():
        return keras.Sequential([*dense_model().layers, TracksItsInputs(ops.sqrt)])

    differing, (said,) = compare(model, list, 12, {"microbatch_size": 5})
    assert differing == ["tracked"]
    assert WHAT in said
    assert "'tracked'" in said


@pytest.mark.parametrize("settings", [{"microbatch_size": 5}, {"accumulation_steps": 3}], ids=str)
def test_metrics_that_count_samples_are_not(settings, float64):
    def metrics():
        of_keras = [keras.metrics.R2Score(name="r2"), keras.metrics.OneHotMeanIoU(2, name="iou")]
        return [errors, Confusion(), *of_keras, "mae", "categorical_accuracy"]

    rows = 12 if "microbatch_size" in settings else 4
    assert compare(dense_model, metrics, rows, settings) == ([], [])


class TracksItsLoss(keras.Model):
    """Counts each loss as often as the batch has samples."""

    def __init__(self):
        super().__init__()
        self.net, self.tracker = dense_model(), keras.metrics.Mean(name="tracked")

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"tracked": self.tracker.result()}


def test_a_mean_of_losses_by_samples_is_not(float64):
    def make():
        model = TracksItsLoss()
        model.build((None, 4))
        return model

    assert compare(make, lambda: None, 4, {"accumulation_steps": 3}) == ([], [])


class LogsNumbers(TracksItsLoss):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = ops.mean(ops.square(self(x, training=True) - y), axis=-1)
            loss = ops.mean(errors)
        gradients = tape.gradient(loss, self.trainable_variables)
        rate = tf.identity(self.optimizer.learning_rate)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(errors)
        return {
            "rate": rate,
            "now": loss,
            "worst": ops.sqrt(loss),
            "norm": tf.linalg.global_norm(gradients),
            "largest": ops.max(errors),
            "samples": tf.cast(tf.shape(x)[0], x.dtype),
            "stopped": 2 * tf.stop_gradient(loss),
            "stopped root": tf.stop_gradient(ops.sqrt(loss)),
            "number": tf.shape(x)[0],
            "chosen": tf.math.count_nonzero(errors > 1),
            "middle": tf.cast(1000 * tf.sqrt(tf.reduce_sum(errors)), tf.int32),
            "tracked": self.tracker.result(),
        }


def test_logs_that_are_no_means_over_samples_are_told_of(float64):
    def make():
        model = LogsNumbers()
        model.build((None, 4))
        return model

    differing, said = compare(make, lambda: None, 4, {"accumulation_steps": 3})
    assert sorted(differing) == ["largest", "middle", "norm", "stopped root", "worst"]
    names = ["worst", "norm", "largest", "stopped root", "middle"]
    for name, text in zip(names, said, strict=True):
        assert WHAT in text
        assert f"the log {name!r}" in text
    assert compare(make, lambda: None, 12, {"microbatch_size": 5}) == ([], [])


class GivesSamples(TracksItsLoss):
    """Gives metrics of Keras what a function makes of targets and outputs."""

    def __init__(self, give):
        super().__init__()
        self.give = give
        self.error = keras.metrics.MeanSquaredError(name="error")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            loss = ops.mean(ops.square(z - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.give(self, y, z)
        return {m.name: m.result() for m in (self.tracker, self.error)}


def number_of_samples(y):
    return ops.shape(y)[0]


GIVEN = {  # and by what, if they do not follow sample by sample
    "centered": (lambda m, y, z: m.tracker.update_state(ops.abs(z - ops.mean(z, 0))), "'Sub'"),
    "reset": (lambda m, y, z: (m.error.reset_state(), m.error.update_state(y, z)), "`reset_state`"),
    "one row": (
        lambda m, y, z: m.error.update_state(*(ops.reshape(a, (1, -1)) for a in (y, z))),
        "'Reshape'",
    ),
    "pairs": (lambda m, y, z: m.tracker.update_state(ops.max(z @ ops.transpose(y), 1)), "'MatMul'"),
    "means": (lambda m, y, z: m.error.update_state(ops.mean(y, 0), ops.mean(z, 0)), "made by"),
    "samples": (lambda m, y, z: m.error.update_state(y, z, y[:, 0] > 0), None),
    "weighted number": (
        lambda m, y, z: m.tracker.update_state(ops.mean(z), number_of_samples(z)),
        None,
    ),
}


@pytest.mark.gate_every_case
@pytest.mark.parametrize("name", GIVEN)
def test_what_a_step_gives_to_metrics_follows_sample_by_sample_or_is_told_of(name, float64):
    give, told = GIVEN[name]

    def make():
        model = GivesSamples(give)
        model.build((None, 4))
        return model

    differing, said = compare(make, lambda: None, 4, {"accumulation_steps": 3})
    assert len(differing) == len(said) == (told is not None)
    assert all(WHAT in text and told in text for text in said)
    assert compare(make, lambda: None, 12, {"microbatch_size": 5}) == ([], [])


class LogsScaledLosses(LogsNumbers):
    """Its optimizer gets the loss before the logs do."""

    def train_step(self, data):
        x, y = data
        mask = tf.cast(y > 0, y.dtype)
        with tf.GradientTape() as tape:
            errors = ops.square(self(x, training=True) - y)
            loss = ops.sum(mask * errors) / ops.sum(mask)
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"now": loss, "twice": 2.0 * loss, "tracked": self.tracker.result()}


@pytest.mark.parametrize("settings", ADDED_UP[:2], ids=str)
def test_losses_that_were_passed_through_the_optimizer_are_logged_as_they_are(settings, float64):
    def make():
        model = LogsScaledLosses()
        model.build((None, 4))
        return model

    rows = 12 if "microbatch_size" in settings else 4
    assert compare(make, lambda: None, rows, settings) == ([], [])
