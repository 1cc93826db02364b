"""What microbatches weigh: activity regularizers, and what one weight can not serve."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    MeanOfSquares,
    averages_activities,
    dense_data,
    dense_model,
    seeded,
)
from training import difference_of_fits
from zoo import masked_data, two_outputs, two_outputs_data

from ga_model import AccumulatingModel, accumulate


def with_activity_regularizer(inputs):
    return keras.layers.Dense(6, "tanh", activity_regularizer=keras.regularizers.L2(0.1))(inputs)


class Regularized(keras.layers.Layer):
    """Has a regularizer, and gives as many outputs as are asked for."""

    def __init__(self, regularizer, outputs=1):
        super().__init__(activity_regularizer=regularizer)
        self.parts = [keras.layers.Dense(4, "tanh") for _ in range(outputs)]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)

    def call(self, x):
        outputs = [part(x) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else outputs

    def compute_output_shape(self, shape):
        shapes = [part.compute_output_shape(shape) for part in self.parts]
        return shapes[0] if len(shapes) == 1 else shapes


def called_twice(inputs):
    layer = Regularized("l2")
    return layer(layer(inputs))


def of_a_function(inputs):
    def regularizer(x):
        return 0.1 * keras.ops.sum(keras.ops.power(x, 4))

    return Regularized(regularizer)(inputs)


ACTIVITIES = {
    "a layer of Keras": with_activity_regularizer,
    "a layer of Keras, sum": with_activity_regularizer,
    "two calls": called_twice,
    "two outputs": lambda x: keras.layers.multiply(Regularized("l2", outputs=2)(x)),
    "a function": of_a_function,
    "a mean": lambda x: Regularized(MeanOfSquares(0.1))(x),
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", [{}, {"run_eagerly": True}], ids=["graph", "eager"])
@pytest.mark.parametrize("name", ACTIVITIES)
def test_activity_regularizers_match_as_keras_adds_them(name, way, float64):
    """Also beside a loss of another kind, in full windows of equal batches, where that is told."""

    def make():
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(2)(ACTIVITIES[name](inputs)))

    is_sum = name.endswith("sum")
    is_alike = name == "a mean" or averages_activities() != is_sum
    loss = keras.losses.MeanSquaredError("sum" if is_sum else "sum_over_batch_size")
    told = pytest.warns(UserWarning, match="average over different things")
    with contextlib.nullcontext() if is_alike else told:
        difference = difference_of_fits(
            make,
            lambda: {"optimizer": keras.optimizers.SGD(0.01), "loss": loss, **way},
            dense_data(24),
            rows=4,
            steps=3,
        )
    assert difference <= TOLERANCE[float64]


def two_masks():
    inputs = keras.Input((5, 3))
    a = keras.layers.SimpleRNN(4, return_sequences=True)(keras.layers.Masking()(inputs))
    return keras.Model(
        inputs,
        [keras.layers.Dense(2, name="masked")(a), keras.layers.Dense(2, name="open")(inputs)],
    )


def test_terms_that_one_weight_can_not_serve_are_named_once(float64):
    x, y = masked_data(24)
    model = accumulate(two_masks(), accumulation_steps=3)
    model.compile("sgd", ["mse", "mse"])
    with pytest.warns(UserWarning, match=r"Exact: \['masked'\].*full: \['open'\]") as caught:
        model.fit(x, [y, y], batch_size=4, shuffle=False, verbose=0)
    (warning,) = (w for w in caught if w.category is UserWarning)
    assert warning.filename == __file__
    with warnings.catch_warnings():  # a second trace of the same step does not repeat it
        warnings.simplefilter("error")
        model.fit(x, [y, y], batch_size=5, shuffle=False, verbose=0)


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
