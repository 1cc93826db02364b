"""What a step computes after an update: a window makes the update later."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, dense_data, dense_model, relative_difference, seeded

from ga_model import accumulate


class Logs(keras.Model):
    """Computes logs before and after its update."""

    def __init__(self, late):
        super().__init__()
        self.net, self.late = dense_model(), late
        self.tracker = keras.metrics.Mean(name="tracked")
        self.of_rows = keras.metrics.MeanSquaredError(name="of_rows")

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            before = self.net(x, training=True)
            loss = tf.reduce_mean(tf.square(before - y))
        variables = self.net.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, variables)
        return self.late(self, x, y, before)


def tracked(model, x, y, before):
    model.tracker.update_state(tf.reduce_mean(tf.abs(model.net(x) - y)))
    return {"tracked": model.tracker.result()}


def of_rows(model, x, y, before):
    model.of_rows.update_state(y, model.net(x))
    return {"of_rows": model.of_rows.result()}


def in_a_function(model, x, y, before):
    tf.function(lambda: model.of_rows.update_state(y, model.net(x)))()
    return {"of_rows": model.of_rows.result()}


def returned(model, x, y, before):
    return {"returned": tf.reduce_mean(model.net(x))}


def norm_of_weights(model, x, y, before):
    return {"norm": tf.norm(model.net.trainable_variables[0])}


def updates(model, x, y, before):
    return {"updates": model.optimizer.iterations}


def rate(model, x, y, before):
    return {"rate": model.optimizer.learning_rate}


def of_predictions_before(model, x, y, before):
    model.of_rows.update_state(y, before)
    model.tracker.update_state(tf.reduce_mean(before))
    return {"of_rows": model.of_rows.result(), "tracked": model.tracker.result()}


SETTINGS = [
    {"accumulation_steps": 3},
    {"microbatch_size": 8, "loss_over": "microbatch"},
    {"accumulation_steps": 3, "microbatch_size": 4},
    {"microbatch_size": 8},
]


def said_of(late, settings):
    """Return what is said, how far weights are from the full batch, and the two logs."""
    models = [accumulate(seeded(lambda: Logs(late)), **settings), seeded(lambda: Logs(late))]
    start, logs = models[1].get_weights(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for model, rows in zip(models, (24 // settings.get("accumulation_steps", 1), 24)):
            schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
            model.compile(keras.optimizers.SGD(0.1 if late is not rate else schedule))
            model.optimizer.build(model.net.trainable_variables)
            history = model.fit(*dense_data(24), batch_size=rows, shuffle=False, verbose=0)
            logs.append([history.history[name][0] for name in sorted(history.history)])
    said = [str(w.message) for w in caught if w.category is UserWarning]
    weights, expected = (model.get_weights() for model in models)
    return said, relative_difference(weights, expected, start), logs


@pytest.mark.parametrize("settings", SETTINGS[:3])
@pytest.mark.parametrize(
    "late", [of_rows, rate, updates, tracked, in_a_function, returned, norm_of_weights]
)
def test_logs_of_updated_weights_are_told_of_once(late, settings, float64):
    said, off, logs = said_of(late, settings)
    (said,) = [message for message in said if "takes the memory of the full batch" not in message]
    assert "then computes logs or metrics with [" in said
    assert off < TOLERANCE[float64]
    assert not np.allclose(*logs, rtol=1e-6)


@pytest.mark.parametrize("late", [of_predictions_before, of_rows, tracked, returned, rate, updates])
def test_on_the_full_batch_they_match_without_a_word(late, float64):
    said, off, logs = said_of(late, SETTINGS[3])
    assert not said
    assert off < TOLERANCE[float64]
    np.testing.assert_allclose(*logs, rtol=TOLERANCE[float64])


@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_a_rate_that_no_update_changes_is_not_told_of(settings, float64):
    said, _, logs = said_of(lambda model, *_: {"rate": model.optimizer.learning_rate}, settings)
    assert not said
    np.testing.assert_allclose(*logs)


@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_logs_of_what_came_before_match_without_a_word(settings, float64):
    said, off, logs = said_of(of_predictions_before, settings)
    assert not said
    assert off < TOLERANCE[float64]
    np.testing.assert_allclose(*logs, rtol=TOLERANCE[float64])
