"""What microbatches weigh: activity regularizers, and what one weight can not serve."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, averages_activities, dense_data, dense_model, seeded
from keras import ops
from training import difference_of_fits
from zoo import two_outputs, two_outputs_data

from ga_model import AccumulatingModel, accumulate


def with_activity_regularizer(inputs):
    return keras.layers.Dense(6, "tanh", activity_regularizer=keras.regularizers.L2(0.1))(inputs)


class Regularized(keras.layers.Layer):
    """Has two outputs, and a regularizer of the user's own."""

    def __init__(self):
        super().__init__(activity_regularizer=lambda x: 0.1 * ops.sum(ops.power(x, 4)))
        self.part = keras.layers.Dense(4, "tanh")

    def build(self, shape):
        self.part.build(shape)

    def call(self, x):
        return self.part(x), self.part(2.0 * x)

    def compute_output_shape(self, shape):
        return (self.part.compute_output_shape(shape),) * 2


def called_twice(inputs):
    layer = Regularized()
    return layer(layer(inputs)[1])[0]


ACTIVITIES = {
    "a layer of Keras": with_activity_regularizer,
    "a layer of Keras, sum": with_activity_regularizer,
    "two calls with two outputs": called_twice,
}


@pytest.mark.parametrize("name", ACTIVITIES)
def test_activity_regularizers_match_as_keras_adds_them(name, float64):
    """Also beside a loss of another kind, in full windows of equal batches, where that is told."""

    def make():
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(2)(ACTIVITIES[name](inputs)))

    is_sum = name.endswith("sum")
    is_alike = averages_activities() != is_sum
    loss = keras.losses.MeanSquaredError("sum" if is_sum else "sum_over_batch_size")
    told = pytest.warns(UserWarning, match="average over different things")
    with contextlib.nullcontext() if is_alike else told:
        difference = difference_of_fits(
            make,
            lambda: {"optimizer": keras.optimizers.SGD(0.01), "loss": loss},
            dense_data(24),
            rows=4,
            steps=3,
        )
    assert difference <= TOLERANCE[float64]


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


def test_a_loss_without_reduction_beside_another_is_refused():
    model = accumulate(two_outputs(), accumulation_steps=3)
    model.compile("sgd", [keras.losses.MeanSquaredError(reduction="none"), "mse"])
    x, y = two_outputs_data(12)
    with pytest.raises(ValueError, match="Set its reduction to 'sum'"):
        model.fit(x, y, batch_size=4, verbose=0)
