"""Layers with gradients of their own, by `tf.custom_gradient`.

A gradient that is not linear, such as one that clips, is another one of a microbatch than of the
full batch: a step on the full batch is exact, and anything else is told.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, dense_data, relative_difference, seeded

from ga_model import accumulate

layers = keras.layers


def clipped(x, upstream):
    return tf.clip_by_value(upstream, -0.02, 0.01)


def bounded(x, upstream):
    return tf.where(tf.abs(upstream) > 0.01, 0.01 * tf.sign(upstream), upstream)


def shifted(x, upstream):
    return upstream + 0.01 * x


def of_norm(x, upstream):
    return upstream / tf.norm(upstream)


def with_mean(x, upstream):
    return tf.tanh(upstream) - 0.5 * tf.reduce_mean(tf.tanh(upstream), 0)


def centered(x, upstream):
    return upstream - 0.5 * tf.reduce_mean(upstream, 0)


def by_a_norm(x, upstream):
    return upstream / tf.norm(x)


def reversed_(x, upstream):
    return -0.3 * upstream


def straight_through(x, upstream):
    return tf.where(tf.abs(x) < 1.0, upstream, tf.zeros_like(upstream))


def of_a_tape(x, upstream):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(2 * x) + tf.nn.silu(x)
    return tape.gradient(y, x, output_gradients=upstream)


def by_weights(x, upstream):
    return upstream @ tf.linalg.diag([1.0, 0.5, 2.0, 1.0, 0.2] * tf.ones((5,), x.dtype))


ENTRY_BY_ENTRY = [clipped, bounded, shifted]
MIXING = [of_norm, with_mean, centered, by_a_norm]
LINEAR = [reversed_, straight_through, of_a_tape, by_weights]
every = pytest.mark.parametrize("rule", [*ENTRY_BY_ENTRY, *MIXING, *LINEAR])


class Own(layers.Layer):
    """Has a gradient by a rule."""

    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def call(self, x):
        @tf.custom_gradient
        def with_gradient(x):
            return tf.tanh(x), lambda upstream: self.rule(x, upstream)

        return with_gradient(x)


class InAFunction(Own):
    """Has it in a function that it calls."""

    def __init__(self, rule):
        super().__init__(rule)
        self.function = tf.function(super().call)

    def call(self, x):
        return self.function(x)


def train(rule, settings, rows=12, layer=Own, **arguments):
    """Return the weights before and after, and what was said."""

    def make():
        parts = [layers.Dense(5), layer(rule), layers.Dense(2)]
        return accumulate(keras.Sequential([keras.Input((4,)), *parts]), **settings)

    model = seeded(make)
    model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
    start = model.get_weights()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(*dense_data(24), batch_size=rows, epochs=2, shuffle=False, verbose=0)
    said = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return start, model.get_weights(), said


def compare(rule, settings, rows=12, **arguments):
    """Return the relative difference from plain Keras on the full batch, and what was said."""
    start, weights, said = train(rule, settings, rows, **arguments)
    _, expected, _ = train(rule, {}, **arguments)
    return relative_difference(weights, expected, start), said


@pytest.mark.parametrize("way", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
@every
def test_a_split_batch_is_exact(rule, way, float64):
    difference, said = compare(rule, {"microbatch_size": 5}, **way)
    assert difference <= TOLERANCE["float64"]
    # A layer whose gradient mixes samples is called as a whole, which costs memory.
    assert ["custom gradient may mix samples: " in text for text in said] == [True] * (
        rule in MIXING
    )


@pytest.mark.parametrize("rule", [of_norm, centered, straight_through])
def test_in_a_function_of_a_layer_a_split_batch_is_exact(rule, float64):
    difference, said = compare(rule, {"microbatch_size": 5}, layer=InAFunction)
    assert difference <= TOLERANCE["float64"]
    assert ["custom gradient may mix samples: " in text for text in said] == [True] * (
        rule in MIXING
    )


@pytest.mark.parametrize("layer", [Own, InAFunction])
@every
def test_what_differs_in_a_window_is_told_and_nothing_else(rule, layer, float64):
    difference, said = compare(rule, {"accumulation_steps": 3}, rows=4, layer=layer)
    told = [text for text in said if "which may not be: one that clips" in text]
    if rule in LINEAR:
        assert said == []
        assert difference <= TOLERANCE["float64"]
    else:
        assert len(told) == len(said) == 1
        assert "test_custom_gradients.py:" in told[0]
        assert difference > 1e-3


class RunsEagerlyOnly(Own):
    def call(self, x):
        assert float(x[0, 0]) < 1e9
        return super().call(x)

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize("rule", [clipped, centered, reversed_])
def test_eagerly_it_is_told_once(rule, float64):
    settings = {"accumulation_steps": 3}
    difference, said = compare(rule, settings, rows=4, run_eagerly=True)
    assert ["which may not be: one that clips" in text for text in said] == [True] * (
        rule not in LINEAR
    )
    assert (difference <= TOLERANCE["float64"]) == (rule in LINEAR)


class Remembers(keras.Model):
    """Keeps what it computed, for its next step."""

    def __init__(self):
        super().__init__()
        self.dense, self.last, self.steps = layers.Dense(2), 0.0, 0

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        logs = super().train_step(data)
        self.last, self.steps = 0.5 * self.last + logs["loss"], self.steps + 1
        return {**logs, "last": self.last}


class Counts(Own):
    calls = 0

    def call(self, x):
        self.calls += 1
        return super().call(x)


def test_eagerly_what_steps_and_layers_keep_is_left_alone():
    model = accumulate(seeded(Remembers), accumulation_steps=3)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(*dense_data(24), batch_size=4, verbose=0)
    assert model.steps == 6
    counts = Counts(reversed_)
    model = accumulate(keras.Sequential([keras.Input((4,)), counts, layers.Dense(2)]))
    model.compile("sgd", "mse", run_eagerly=True, accumulation_steps=3)
    before = counts.calls
    model.fit(*dense_data(24), batch_size=4, verbose=0)
    assert counts.calls == before + 6


def test_what_cannot_run_in_a_graph_is_not_read(float64):
    arguments = {"rows": 4, "layer": RunsEagerlyOnly, "run_eagerly": True}
    _, said = compare(clipped, {"accumulation_steps": 3}, **arguments)
    (text,) = said
    assert "is read from the graph of a step. Received: 'sequential" in text


@pytest.mark.parametrize("rule", [clipped, of_norm])
def test_where_microbatches_are_asked_for_it_is_told(rule, float64):
    difference, said = compare(rule, {"microbatch_size": 5, "loss_over": "microbatch"})
    assert difference > 1e-3
    assert ["which may not be: one that clips" in text for text in said] == [True]


def test_what_is_drawn_to_read_a_gradient_does_not_run():
    calls = []

    def counting(x, upstream):
        calls.append(1)
        ran = tf.numpy_function(lambda g: np.asarray(calls.append("ran") or g), [upstream], g_type)
        return 0.5 * tf.ensure_shape(ran, upstream.shape)

    g_type = tf.float32
    train(counting, {"accumulation_steps": 2})
    assert calls.count("ran") == 4  # batches
