"""`microbatch_size="auto"`: the search leaves state that Keras does not know of.

Training with it equals training with the size that it found, in variables of TensorFlow, optimizers
and Python attributes, whoever has them.
"""

import random
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import dense_data, seeded
from test_auto import Limited, Memory

from ga_model import accumulate
from ga_model.base._internals import global_seed, set_global_seed

# What a step reaches by a global name: a variable, an optimizer, and what it makes when it runs.
outside = types.SimpleNamespace()


class CountingLoss(keras.losses.Loss):
    """Grows with the number of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, y, y_pred):
        self.calls += 1
        return tf.reduce_mean((y_pred - y) ** 2, axis=-1) * (1.0 + 0.01 * self.calls)


class Record:
    """An object of the script, with another one in it."""

    def __init__(self, inner=None):
        self.steps, self.inner = [], inner


class Keeping(keras.Model):
    """Keeps state in all places that Keras does not track."""

    def __init__(self, memory):
        super().__init__()
        self.limited, self.hidden = Limited(memory), keras.layers.Dense(6, activation="tanh")
        self.head = keras.layers.Dense(2)
        self.steps_run, self.seen, self.calls = 0, [], 0
        self.array, self.record = np.zeros(2), Record(Record())
        self.scale = tf.Variable(1.0, trainable=False, dtype=keras.config.floatx())
        self.made = None

    def build(self, shape):
        self.hidden.build(shape)
        self.head.build((None, 6))

    def call(self, x):
        self.calls += 1
        return self.head(self.hidden(self.limited(x)))

    def train_step(self, data):
        x, y = data
        self.steps_run += 1
        self.seen.append(self.steps_run)
        self.array += 1.0
        self.record.inner.steps.append(self.steps_run)
        self.scale.assign_add(0.1)
        outside.variable.assign(0.9 * outside.variable + 0.2)
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss(y, self(x)) * self.scale * outside.variable
            loss *= 1.0 + 0.01 * (len(self.seen) + self.array[0] + len(self.record.inner.steps))
        hidden, head = self.hidden.trainable_variables, self.head.trainable_variables
        self.optimizer.apply(tape.gradient(loss, hidden), hidden)
        outside.optimizer.apply(tape.gradient(loss, head), head)
        return {"loss": loss}


class MakingVariables(Keeping):
    """Makes a variable of its own, and one of a global name, when its step runs at first."""

    def train_step(self, data):
        if self.made is None:
            self.made = tf.Variable(1.0, trainable=False)
        if outside.made is None:
            outside.made = tf.Variable(1.0, trainable=False)
        self.made.assign_add(1.0)
        outside.made.assign_add(1.0)
        return super().train_step(data)


class Drawing(Keeping):
    """Draws random numbers without a seed, as `keras.random` and Python have them."""

    def call(self, x):
        x = x * (1.0 + 0.1 * keras.random.uniform((), dtype=keras.config.floatx()))
        return super().call(x) * (1.0 + 0.1 * random.random())


def trained(make, size, *, eager, is_built, batches=3):
    """Train, and return the model and all that it has changed."""
    set_global_seed(None)
    outside.variable = tf.Variable(1.0, trainable=False, dtype=keras.config.floatx())
    outside.optimizer = keras.optimizers.Adam(0.1)
    outside.made = None
    model = accumulate(seeded(lambda: make(Memory(4))), microbatch_size=size)
    model.compile("adam", CountingLoss(), run_eagerly=eager)
    if is_built:
        model(np.ones((1, 4), "float32"))
        model.optimizer.build(model.hidden.trainable_variables)
    if is_built and not eager:
        outside.optimizer.build(model.head.trainable_variables)
    random.seed(1)
    x, y = (part.astype(keras.config.floatx()) for part in dense_data(12 * batches))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "What a custom loss averages over")
        model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    assert model.microbatch_size == 4
    seed = global_seed()
    variables = [*model.variables, *model.optimizer.variables, *outside.optimizer.variables]
    variables += [model.scale, outside.variable, *filter(None, [model.made, outside.made])]
    variables += [] if seed is None else [seed.state]
    python = [model.steps_run, list(model.seen), model.calls, model.loss.calls, random.random()]
    python += [*model.array, list(model.record.inner.steps)]
    return [np.array(v) for v in variables], python


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "eager", "is_built"),
    [
        (Keeping, True, True),
        (Keeping, False, True),
        (Keeping, True, False),
        (MakingVariables, True, True),
        (Drawing, True, True),
        (Drawing, False, True),
    ],
)
def test_a_training_equals_that_with_the_size_it_finds(make, eager, is_built, float64):
    (values, python), (expected, expected_python) = (
        trained(make, size, eager=eager, is_built=is_built) for size in ("auto", 4)
    )
    assert python == expected_python
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-12, atol=1e-12)
