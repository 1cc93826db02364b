"""What an optimizer does per update happens once per window, on the window's gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from helpers import (
    TOLERANCE,
    dense_data,
    dense_model,
    difference_of_fits,
    fit_pair,
    float32_in_the_sweep,
    seeded,
)

from ga_model import GradientAccumulator, accumulate


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.2, decay_steps=2, decay_rate=0.5)


OPTIMIZERS = {
    "schedule": lambda: keras.optimizers.SGD(schedule(), momentum=0.9),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8),
    "ema that overwrites": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
    ),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.05),
    "weight_decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.3),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}

if hasattr(keras.optimizers, "Muon"):  # since Keras 3.10
    OPTIMIZERS["muon"] = lambda: keras.optimizers.Muon(0.01)

if hasattr(keras.optimizers, "ScheduleFreeAdamW"):  # since Keras 3.14
    OPTIMIZERS["schedule free"] = lambda: keras.optimizers.ScheduleFreeAdamW(0.01)

if hasattr(keras.optimizers, "MultiOptimizer"):  # since Keras 3.15

    def several():
        by_rank = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)
        return keras.optimizers.MultiOptimizer(lambda v: by_rank[len(v.shape) == 1])

    OPTIMIZERS["several"] = several


class NormalizesInPairs(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        pairs = [(gradient / (1e-3 + tf.norm(gradient)), v) for gradient, v in grads_and_vars]
        return super().apply_gradients(pairs)


def patched():
    optimizer = keras.optimizers.SGD(0.1)
    original = optimizer.apply_gradients
    optimizer.apply_gradients = lambda pairs: original([(2.0 * g, v) for g, v in pairs])
    return optimizer


class AppliesWithoutPairs(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize("way", [{"rows": 4, "steps": 3}, {"rows": 12, "steps": 1, "size": 5}])
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        (dense_model, lambda: NormalizesInPairs(0.1)),
        (AppliesWithoutPairs, lambda: NormalizesInPairs(0.1)),
        (dense_model, patched),
    ],
    ids=["class", "past it", "instance"],
)
@pytest.mark.every_case
def test_the_method_that_a_step_calls_makes_the_update(make, optimizer, way, float64):
    def arguments():
        return {"optimizer": optimizer(), "loss": "mse"}

    difference = difference_of_fits(make, arguments, dense_data(34), **way)
    assert difference <= TOLERANCE[float64]


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


def test_every_optimizer_of_keras_is_in_a_test():
    every = {
        cls
        for cls in vars(keras.optimizers).values()
        if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)
    }
    tested = {type(make()) for make in (*OPTIMIZERS.values(), *zoo.OPTIMIZERS.values())}
    assert tested == every - {keras.optimizers.Optimizer}


@pytest.mark.parametrize("name", OPTIMIZERS)
@float32_in_the_sweep
def test_optimizer_settings_match_the_whole_batch(name, dtype):
    difference = difference_of_fits(
        dense_model,
        lambda: {"optimizer": OPTIMIZERS[name](), "loss": "mse"},
        dense_data(34),
        rows=4,
        steps=3,
        epochs=3,
    )
    assert difference <= TOLERANCE[dtype]


begins_with_values = pytest.mark.skipif(
    "schedule free" not in OPTIMIZERS, reason="Keras has no ScheduleFreeAdamW before 3.14"
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
    x, y = dense_data(24)
    built = [keras.Input((4,))] if is_built else []
    models = []
    for given, eager in (({}, True), (settings, False)):
        model = seeded(
            lambda: keras.Sequential([*built, keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
        )
        model = accumulate(model, **given) if given else model
        model.compile(OPTIMIZERS["schedule free"](), "mse", run_eagerly=eager)
        size = 24 // given.get("accumulation_steps", 1)
        model.fit(x, y, batch_size=size, epochs=3, shuffle=False, verbose=0)
        models.append(model.get_weights())
    for weights, expected in zip(*models, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-12, atol=1e-14)


@begins_with_values
@pytest.mark.one_device("of an optimizer that is built early")
def test_an_optimizer_that_begins_with_weights_that_have_no_values_is_refused():
    x, y = dense_data(12)
    model = accumulate(seeded(Lazy), accumulation_steps=3)
    model.compile(OPTIMIZERS["schedule free"](), run_eagerly=False)
    with pytest.raises(ValueError, match=r"Received: 'schedule_free_adam_?w'.*creates\. Create"):
        model.fit(x, y, batch_size=4, verbose=0)
    model = accumulate(seeded(Lazy), accumulation_steps=3)
    model.part(x)
    model.compile(OPTIMIZERS["schedule free"]())
    model.fit(x, y, batch_size=4, verbose=0)
    assert model.optimizer.iterations == 1
    other = accumulate(seeded(Lazy), accumulation_steps=3)
    other.compile("adam")  # begins with zeros
    other.fit(x, y, batch_size=4, verbose=0)


class Shrink(keras.constraints.Constraint):
    """Not idempotent: applied twice it shrinks twice."""

    def __call__(self, w):
        return 0.9 * w


def test_a_constraint_is_applied_once_per_update(dtype):
    def make():
        return keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(6, activation="tanh", kernel_constraint=Shrink()),
                keras.layers.Dense(2, kernel_constraint=Shrink()),
            ]
        )

    def arguments():
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}

    difference = difference_of_fits(make, arguments, dense_data(34), rows=4, steps=3)
    assert difference <= TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "updates"), [(36, 6), (34, 6), (28, 6), (24, 4)])
def test_iterations_count_updates(rows, updates):
    model, reference, _ = fit_pair(
        dense_model,
        lambda: {"optimizer": "adam", "loss": "mse"},
        dense_data(rows),
        rows=4,
        steps=3,
    )
    assert model.optimizer.iterations == reference.optimizer.iterations == updates


def test_the_schedule_is_read_at_the_number_of_updates(float64):
    model, *_ = fit_pair(
        dense_model,
        lambda: {"optimizer": OPTIMIZERS["schedule"](), "loss": "mse"},
        dense_data(36),
        rows=4,
        steps=3,
    )
    np.testing.assert_allclose(model.optimizer.learning_rate, 0.2 * 0.5 ** (6 / 2))
