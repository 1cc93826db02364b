"""What microbatches weigh: a weight that is computed, and what one weight can not serve."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import dense_data, dense_model, seeded
from zoo import float8, two_outputs, two_outputs_data

from ga_model import AccumulatingModel, accumulate


class WeighsByOutput(AccumulatingModel, keras.Sequential):
    """A weight that depends on the variables; the sum's derivation takes it as a constant."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y_pred - y))

    def microbatch_weight(self, x, y=None, sample_weight=None):
        return tf.reduce_sum(tf.abs(self(x)))


def test_a_weight_is_not_differentiated(float64):
    x, y = dense_data(12)
    model = seeded(lambda: WeighsByOutput(dense_model().layers))
    model.compile(keras.optimizers.SGD(1.0), loss=None, accumulation_steps=3)
    start = model.get_weights()
    accumulated = [0.0] * len(start)
    total = 0.0
    for i in range(0, 12, 4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[i : i + 4]) - y[i : i + 4]))
        weight = tf.reduce_sum(tf.abs(model(x[i : i + 4])))
        gradients = tape.gradient(loss, model.trainable_variables)
        accumulated = [a + weight * g for a, g in zip(accumulated, gradients)]
        total += weight
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for w, s, a in zip(model.get_weights(), start, accumulated, strict=True):
        np.testing.assert_allclose(w, s - a / total, rtol=1e-10)


def test_float8_layers_remember_a_batch_without_weight_as_plain_keras_does():
    x, y = dense_data(12)
    trained = []
    for size in (None, 4):
        model = accumulate(seeded(float8), microbatch_size=size)
        model.compile("sgd", keras.losses.MeanSquaredError("mean_with_sample_weight"))
        model.fit(x, y, sample_weight=np.zeros(12), batch_size=12, verbose=0, shuffle=False)
        trained.append(model.get_weights())
    for a, b in zip(*trained, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_loss_without_reduction_beside_another_is_refused():
    model = accumulate(two_outputs(), accumulation_steps=3)
    model.compile("sgd", [keras.losses.MeanSquaredError(reduction="none"), "mse"])
    x, y = two_outputs_data(12)
    with pytest.raises(ValueError, match="Set its reduction to 'sum'"):
        model.fit(x, y, batch_size=4, verbose=0)
