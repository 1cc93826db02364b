"""`GradientAccumulator` in loops of the user's own, with what TensorFlow alone has."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients import gradients_of
from helpers import assert_close, dense_data, dense_model, seeded

from ga_model import GradientAccumulator

PARTS = [range(4), range(4, 5), range(5, 12)]

pytestmark = pytest.mark.every_case


def mean_gradients(model, x, y):
    x, y = tf.convert_to_tensor(x), tf.convert_to_tensor(y)
    return gradients_of(model, lambda: tf.reduce_mean(tf.square(model(x, training=True) - y)))


@pytest.mark.parametrize("way", ["a function for each", "a whole window in one function"])
def test_a_compiled_loop_matches_the_whole_batch(way, float64):
    x, y = dense_data(12)
    model, reference = seeded(dense_model), seeded(dense_model)
    optimizers = [keras.optimizers.Adam(0.01) for _ in range(2)]
    accumulator = GradientAccumulator()
    start = model.get_weights()

    def add(x, y, weight):
        gradients = mean_gradients(model, x, y)
        accumulator.add(gradients, model.trainable_variables, weight=weight)

    microbatch = tf.function(lambda x, y: add(x, y, tf.shape(x)[0]), reduce_retracing=True)
    update = tf.function(lambda: accumulator.apply(optimizers[0]))

    @tf.function
    def window(x, y):
        for i in tf.range(3):
            rows = slice(4 * i, 4 * i + 4)
            add(x[rows], y[rows], 1.0)
        accumulator.apply(optimizers[0])

    for _ in range(3):
        if way == "a function for each":
            for part in PARTS:
                microbatch(x[part], y[part])
            assert accumulator.num_microbatches == 3
            update()
            update()  # nothing is left, nothing happens
        else:
            window(tf.constant(x), tf.constant(y))
        assert accumulator.num_microbatches == 0
        optimizers[1].apply(mean_gradients(reference, x, y), reference.trainable_variables)
    assert optimizers[0].iterations == 3
    assert_close(model, reference, start)
    assert microbatch.experimental_get_tracing_count() <= 2  # the first shape, and any shape
    assert update.experimental_get_tracing_count() <= 1


@pytest.mark.parametrize("weights", [[1.0, 2.0, 9.0], [None] * 3], ids=str)
def test_gradients_that_overwrite_their_variable_are_neither_weighted_nor_summed(weights):
    scale, kernel = keras.Variable([5.0, 5.0]), keras.Variable([0.0])
    scale.overwrite_with_gradient = True
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([scale, kernel])
    accumulator = GradientAccumulator()
    parts = [[1.0, 3.0], [4.0, 2.0], [2.0, 2.5]]
    for _ in range(2):
        for part, weight in zip(parts, weights, strict=True):
            gradients = [tf.constant(part), tf.constant([1.0])]
            accumulator.add(gradients, [scale, kernel], weight=weight)
        accumulator.apply(optimizer)
        np.testing.assert_array_equal(scale, [4.0, 3.0])
        scale.assign([9.0, 9.0])  # of the window before, nothing is left
    np.testing.assert_allclose(kernel, [-2.0] if weights[0] else [-6.0], rtol=1e-6)
    for parts in ([(0, np.nan), (3, 2.0)], [(3, 2.0), (0, np.nan)]):  # NaN without weight
        accumulator = GradientAccumulator()
        for weight, value in parts:
            gradient = tf.constant([value, value])
            accumulator.add([gradient, gradient[:1]], [scale, kernel], weight=weight)
        assert [mean.numpy().tolist() for mean in accumulator.mean()] == [[2.0, 2.0], [2.0]]


def test_a_loss_scale_that_changes_is_that_of_the_function_that_was_traced_before_it_was_built():
    variables = [keras.Variable([1.0, 2.0]) for _ in range(2)]
    optimizers = [
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=1024.0, dynamic_growth_steps=2
        )
        for _ in range(2)
    ]
    accumulator = GradientAccumulator()

    def gradient(optimizer, variable):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable * [1.0, 3.0]))
        return tape.gradient(loss, variable.value)

    @tf.function
    def train():
        accumulator.add([gradient(optimizers[0], variables[0])], variables[:1], weight=2)
        accumulator.apply(optimizers[0])

    for _ in range(7):
        train()
        optimizers[1].apply([gradient(optimizers[1], variables[1])], variables[1:])
    assert float(optimizers[0].dynamic_scale) > 1024.0
    np.testing.assert_array_equal(*variables)
