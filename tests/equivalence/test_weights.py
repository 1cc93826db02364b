"""What microbatches weigh, and what an optimizer does once per window, on its gradient."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import dense_data, dense_model, seeded
from models import NormalizesInPairs

from ga_model import GradientAccumulator, accumulate


@pytest.mark.parametrize("jit_compile", [False, True])
def test_only_a_heavier_microbatch_has_sums_multiplied(jit_compile):
    """On a CPU this would read and write all sums once more. XLA does both at once."""
    model = accumulate(seeded(dense_model), accumulation_steps=2)
    model.compile("sgd", "mse", jit_compile=jit_compile)
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


@begins_with_values
@pytest.mark.one_device("of an optimizer that is built early")
@pytest.mark.parametrize("settings", [{"microbatch_size": 4}, {"accumulation_steps": 3}])
@pytest.mark.parametrize("is_built", [True, False])
def test_an_optimizer_begins_once_with_the_values_of_the_weights(is_built, settings, float64):
    """As eagerly. In a graph, plain Keras begins anew at every batch (seen in Keras 3.15.1)."""
    inputs = [keras.Input((4,))] if is_built else []
    trained = []
    for given, eager in (({}, True), (settings, False)):
        model = seeded(lambda: keras.Sequential([*inputs, *dense_model().layers]))
        model = accumulate(model, **given) if given else model
        model.compile(keras.optimizers.ScheduleFreeAdamW(0.01), "mse", run_eagerly=eager)
        size = 24 // given.get("accumulation_steps", 1)
        model.fit(*dense_data(24), batch_size=size, epochs=3, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    for weights, expected in zip(*trained, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-12, atol=1e-14)


@begins_with_values
@pytest.mark.one_device("of an optimizer that is built early")
def test_an_optimizer_begins_with_the_values_of_weights_that_the_first_step_makes(float64):
    trained = []
    for settings, size in (({}, 12), ({"accumulation_steps": 3}, 4)):
        model = seeded(Lazy)
        model = accumulate(model, **settings) if settings else model
        model.compile(keras.optimizers.ScheduleFreeAdamW(0.01), run_eagerly=not settings)
        model.fit(*dense_data(12), batch_size=size, epochs=3, shuffle=False, verbose=0)
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
