"""What microbatches weigh, and what an optimizer does once per window, on its gradient."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import dense_data, dense_model, in_the_sweep
from models import NormalizesInPairs
from training import compiled

from ga_model import GradientAccumulator


@pytest.mark.parametrize("jit_compile", [False, True])
def test_only_a_heavier_microbatch_has_sums_multiplied(jit_compile):
    """On a CPU this would read and write all sums once more. XLA does both at once."""
    model = compiled(accumulation_steps=2, jit_compile=jit_compile)
    graphs, trace = [], tf.__internal__.FuncGraph.__init__

    def noted(graph, *args, **kwargs):
        graphs.append(graph)
        trace(graph, *args, **kwargs)

    with mock.patch.object(tf.__internal__.FuncGraph, "__init__", noted):
        model.train_on_batch(*dense_data(4))
    kinds = [op.type for graph in graphs for op in graph.get_operations()]
    assert kinds.count("Switch") == (0 if jit_compile else len(model.weights))


# What an optimizer does once.


def test_an_accumulator_applies_as_the_optimizer_does(float64):
    trained = []
    for accumulates in (True, False):
        variable = keras.Variable(np.ones(3))
        gradient = tf.constant([1.0, 2.0, 3.0], tf.float64)
        optimizer = NormalizesInPairs(0.1)
        if accumulates:
            accumulator = GradientAccumulator()
            accumulator.add([gradient], [variable], weight=1.0)
            accumulator.apply(optimizer)
        else:
            optimizer.apply_gradients([(gradient, variable)])
        trained.append(variable.numpy())
    np.testing.assert_allclose(*trained, rtol=1e-14)


begins_with_values = pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="which Keras has since 3.14"
)


class Lazy(keras.Model):
    """Its own step makes the weights, of a part that is called nowhere else."""

    def __init__(self):
        super().__init__()
        self.part = keras.Sequential([keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])

    def call(self, x):
        return x

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.part(data[0], training=True) - data[1]))
        variables = self.part.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}


def not_built():
    return keras.Sequential(dense_model().layers)


@pytest.mark.every_case
@begins_with_values
@pytest.mark.one_device("of an optimizer that is built early")
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (dense_model, {"microbatch_size": 4}),
        (Lazy, {"accumulation_steps": 3}),
        in_the_sweep(dense_model, {"accumulation_steps": 3}),
        in_the_sweep(not_built, {"microbatch_size": 4}),
        in_the_sweep(not_built, {"accumulation_steps": 3}),
    ],
)
def test_an_optimizer_begins_once_with_the_values_of_the_weights(make, settings, float64):
    """As eagerly. In a graph, plain Keras begins anew at every batch (seen in Keras 3.15.1)."""
    trained = []
    for given in ({}, settings):
        optimizer = keras.optimizers.ScheduleFreeAdamW(0.01)
        model = compiled(make, optimizer=optimizer, run_eagerly=not given, **given)
        size = 24 // given.get("accumulation_steps", 1)
        model.fit(*dense_data(24), batch_size=size, epochs=3, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    for weights, expected in zip(*trained, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-12, atol=1e-14)


@begins_with_values
def test_an_optimizer_that_begins_with_weights_that_have_no_values_is_refused():
    layer, accumulator = keras.layers.Dense(2), GradientAccumulator()
    optimizer = keras.optimizers.ScheduleFreeAdamW(0.01)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(x) - y))
        variables = layer.trainable_variables
        accumulator.add(tape.gradient(loss, variables), variables, weight=4)
        accumulator.apply(optimizer)

    with pytest.raises(
        ValueError, match=r"of the weights, .*'schedule_free_adam_?w'.*creates\. Create"
    ):
        step(*map(tf.constant, dense_data(4)))
