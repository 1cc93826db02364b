"""A `train_step` of the user's own, with one optimizer or several, and what overrides its parts."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    assert_changed,
    dense_data,
    dense_model,
    relative_difference,
    seeded,
)
from training import difference_of_fits

from ga_model import AccumulatingModel, accumulate


def arguments():
    return {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"}


class Distance(keras.Model):
    """The custom step of the Keras guides: no `scale_loss`, `compute_loss` called."""

    def __init__(self):
        super().__init__()
        self.net = dense_model()

    def call(self, inputs):
        return self.net(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class OwnLoss(Distance):
    """Computes its loss without Keras."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}


class AccumulatingOwnLoss(AccumulatingModel, OwnLoss):
    pass


class OwnStepInSubclass(AccumulatingModel, keras.Model):
    """Overrides `train_step` and `compute_loss` right of nothing: the mixin is its base."""

    def __init__(self):
        super().__init__()
        self.net = dense_model()

    def call(self, inputs):
        return self.net(inputs)

    def compute_loss(self, x, y, y_pred, sample_weight):
        return tf.reduce_mean(tf.square(y_pred - y))

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "constant": 1.0}


class StepFromAMixin:
    def train_step(self, data):
        return OwnLoss.train_step(self, data)


class MixinOnTheLeft(StepFromAMixin, OwnStepInSubclass):
    pass


class CompiledStep(OwnLoss):
    """Its step is a `tf.function` already."""

    @tf.function
    def train_step(self, data):
        return OwnLoss.train_step(self, data)


class AccumulatingCompiledStep(AccumulatingModel, OwnLoss):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("make", "jit_compile"),
    [
        (AccumulatingOwnLoss, False),
        (OwnStepInSubclass, False),
        (MixinOnTheLeft, False),
        (CompiledStep, False),
        (AccumulatingCompiledStep, False),
        (AccumulatingCompiledStep, True),
    ],
)
def test_a_train_step_of_the_users_own_matches_the_whole_batch(make, jit_compile, float64):
    difference = difference_of_fits(
        make,
        lambda: {**arguments(), "jit_compile": jit_compile},
        dense_data(34),
        rows=4,
        steps=3,
    )
    assert difference <= TOLERANCE[float64]


class TwoOptimizers(keras.Model):
    """Two networks, each with an optimizer of its own, both updated from one window's start."""

    def __init__(self):
        super().__init__()
        self.a, self.b = dense_model(), dense_model()

    b_optimizer = None  # a default that the class has

    def compile(self, a_optimizer, b_optimizer):
        super().compile()
        self.a_optimizer, self.b_optimizer = a_optimizer, b_optimizer

    def call(self, inputs):
        return self.a(inputs) * self.b(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            a_loss = tf.reduce_mean(tf.square(self.a(x) * self.b(x) - y))
            b_loss = tf.reduce_mean(tf.abs(self.a(x) + self.b(x) - y))
            scaled = self.b_optimizer.scale_loss(b_loss)
        a, b = self.a.trainable_variables, self.b.trainable_variables
        self.a_optimizer.apply(tape.gradient(a_loss, a), a)
        self.b_optimizer.apply(tape.gradient(scaled, b), b)
        return {"a_loss": a_loss, "b_loss": b_loss}


class Sequential(TwoOptimizers):
    """Updates one network before it computes the other's gradient, as many a GAN does."""

    def train_step(self, data):
        x, y = data
        a, b = self.a.trainable_variables, self.b.trainable_variables
        with tf.GradientTape() as tape:
            a_loss = tf.reduce_mean(tf.square(self.a(x) * self.b(x) - y))
        self.a_optimizer.apply(tape.gradient(a_loss, a), a)
        with tf.GradientTape() as tape:
            b_loss = self.b_optimizer.scale_loss(tf.reduce_mean(tf.abs(self.a(x) + self.b(x) - y)))
        self.b_optimizer.apply(tape.gradient(b_loss, b), b)
        return {"a_loss": a_loss, "b_loss": b_loss}


class InAList(TwoOptimizers):
    """Keeps its optimizers in a list and a dict."""

    def compile(self, a_optimizer, b_optimizer):
        super().compile(a_optimizer, b_optimizer)
        self.both = [self.a_optimizer, {"b": self.b_optimizer}]
        del self.a_optimizer, self.b_optimizer

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            a_loss = tf.reduce_mean(tf.square(self.a(x) * self.b(x) - y))
            b_loss = tf.reduce_mean(tf.abs(self.a(x) + self.b(x) - y))
        a, b = self.a.trainable_variables, self.b.trainable_variables
        self.both[0].apply(tape.gradient(a_loss, a), a)
        self.both[1]["b"].apply(tape.gradient(b_loss, b), b)
        return {"a_loss": a_loss, "b_loss": b_loss}


class InAPrivateList(InAList):
    """Fills its list when it has been set."""

    def compile(self, a_optimizer, b_optimizer):
        TwoOptimizers.compile(self, a_optimizer, b_optimizer)
        self._both = []
        self._both += [self.a_optimizer, {"b": self.b_optimizer}]
        del self.a_optimizer, self.b_optimizer

    @property
    def both(self):
        return self._both


@pytest.mark.parametrize(
    ("step", "when"),
    [
        (TwoOptimizers, "wrapped after compile"),
        (Sequential, "wrapped before compile"),
        (InAList, "wrapped after compile"),
        (InAPrivateList, "subclass"),
    ],
)
def test_several_optimizers_each_have_their_own_window(step, when, float64):
    """And all gradients are taken at the weights that the window starts with."""
    x, y = dense_data(34)
    trained = []
    for accumulates in (True, False):
        if accumulates and when == "subclass":
            model = seeded(type("Subclass", (AccumulatingModel, step), {}))
            model.accumulation_steps = 3
        else:
            model = seeded(step if accumulates else TwoOptimizers)
        if accumulates and when == "wrapped before compile":
            accumulate(model, accumulation_steps=3)
        optimizers = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(a_optimizer=optimizers[0], b_optimizer=optimizers[1])
        if accumulates and when == "wrapped after compile":
            accumulate(model, accumulation_steps=3)
        start = model.get_weights()
        with told_of_order(accumulates and step is Sequential):
            model.fit(x, y, batch_size=4 if accumulates else 12, epochs=2, shuffle=False, verbose=0)
        assert [int(o.iterations) for o in optimizers] == [6, 6]
        trained.append(model.get_weights())
    assert_changed(trained[1], start)
    assert relative_difference(*trained, start) <= TOLERANCE[float64]


def told_of_order(is_told):
    """Return a context in which a warning must tell of weights not yet updated, or must not."""
    if is_told:
        return pytest.warns(UserWarning, match="To train exactly")
    return contextlib.nullcontext()


# What cannot be accumulated.


class AppliesTwice(OwnLoss):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


class AppliesNone(OwnLoss):
    def train_step(self, data):
        return {"loss": tf.reduce_mean(self(data[0]))}


class AppliesAnInnerModels(OwnLoss):
    def __init__(self, is_built=False):
        super().__init__()
        self.net.compile(keras.optimizers.SGD(name="inner"))
        if is_built:
            self.net.optimizer.build(self.net.trainable_variables)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.net.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (AppliesTwice, "applies 'sgd' twice"),
        (AppliesNone, "applies none"),
        (
            lambda: AppliesAnInnerModels(is_built=True),
            r"applies \['inner'\], reached by a global variable",
        ),
        (AppliesAnInnerModels, r"applies \['inner'\], reached by a global variable"),
    ],
)
def test_steps_that_can_not_be_accumulated_are_refused_and_train_without(make, message):
    x, y = dense_data(12)
    model = accumulate(make(), accumulation_steps=3)
    model.compile(keras.optimizers.SGD(name="sgd"), "mse")
    model.build((None, 4))
    start = model.get_weights()
    with pytest.raises(RuntimeError, match=message):
        model.fit(x, y, batch_size=4, verbose=0)
    for w, s in zip(model.get_weights(), start, strict=True):
        np.testing.assert_array_equal(w, s)
    model.accumulation_steps = 1  # the way out that the message names
    model.compile(keras.optimizers.SGD(name="sgd"), "mse")
    model.fit(x, y, batch_size=4, verbose=0)


class AppliesInTurn(TwoOptimizers):
    """Applies its second optimizer every other time, which only eager mode does."""

    calls = 0

    def train_step(self, data):
        x, y = data
        self.calls += 1
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self.a(x) * self.b(x) - y))
        a, b = self.a.trainable_variables, self.b.trainable_variables
        self.a_optimizer.apply(tape.gradient(loss, a), a)
        if self.calls % 2:
            self.b_optimizer.apply(tape.gradient(loss, b), b)
        return {"loss": loss}


@pytest.mark.filterwarnings("ignore:A window of microbatches does not train")
def test_an_optimizer_that_is_applied_in_some_microbatches_of_a_batch_is_refused():
    x, y = dense_data(12)
    model = accumulate(AppliesInTurn(), microbatch_size=4, loss_over="microbatch")
    model.compile(keras.optimizers.SGD(), keras.optimizers.SGD())
    model.run_eagerly = True
    with pytest.raises(RuntimeError, match="must apply the same optimizers, in the same order"):
        model.fit(x, y, batch_size=12, verbose=0)


class AppliesInABranch(OwnLoss):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)

        def apply():
            self.optimizer.apply(gradients, variables)
            return 0

        tf.cond(tf.math.is_finite(loss), apply, lambda: 0)
        return {"loss": loss}


def test_an_update_in_a_branch_of_the_steps_own_is_refused():
    x, y = dense_data(12)
    model = accumulate(AppliesInABranch(), accumulation_steps=3)
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match=r"applies one inside `tf\.cond`"):
        model.fit(x, y, batch_size=4, verbose=0)


class SetsItsLearningRate(OwnLoss):
    """Writes to its optimizer, and applies without naming the variables."""

    def train_step(self, data):
        self.optimizer.learning_rate = 0.5
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        assert isinstance(optimizer, keras.optimizers.SGD)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_step_can_write_to_its_optimizer_and_apply_without_variables(is_scaled, float64):
    """Up to Keras 3.11, a LossScaleOptimizer does not know the variables, either."""

    def arguments():
        optimizer = keras.optimizers.SGD(0.1)
        if is_scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        return {"optimizer": optimizer, "loss": "mse"}

    def make():
        model = SetsItsLearningRate()
        model.build((None, 4))
        return model

    x, y = dense_data(34)
    trained = []
    for accumulates in (True, False):
        model = seeded(make)
        if accumulates:
            accumulate(model, accumulation_steps=3)
        model.compile(**arguments())
        model.optimizer.build(model.trainable_variables)
        start = model.get_weights()
        model.fit(x, y, batch_size=4 if accumulates else 12, shuffle=False, verbose=0)
        np.testing.assert_allclose(model.optimizer.learning_rate, 0.5)
        trained.append(model.get_weights())
    assert relative_difference(*trained, start) <= TOLERANCE[float64]


class OwnSignatures(OwnLoss):
    """Methods that take less than Keras's do."""

    def compute_loss(self, y, y_pred):
        return tf.reduce_mean(tf.square(y_pred - y))

    def fit(self, x, y, **kwargs):
        return super().fit(x, y, shuffle=False, verbose=0, **kwargs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_methods_with_signatures_of_their_own_work(float64):
    x, y = dense_data(34)
    trained = []
    for steps in (3, 1, None):
        model = seeded(OwnSignatures)
        if steps:
            accumulate(model, accumulation_steps=steps)
        model.compile(**arguments())
        model.build((None, 4))
        start = model.get_weights()
        model.fit(x, y, batch_size=12 // (steps or 1), epochs=2)
        trained.append(model.get_weights())
    assert relative_difference(trained[0], trained[2], start) <= TOLERANCE[float64]
    assert relative_difference(trained[1], trained[2], start) == 0.0


class BringsItsCallbacks(keras.Sequential):
    def fit(self, *args, callbacks=None, **kwargs):
        self.brought = keras.callbacks.History()
        callbacks = [self.brought] if callbacks is None else callbacks
        return super().fit(*args, callbacks=callbacks, **kwargs)


def test_a_fit_that_brings_its_callbacks_has_them_where_nothing_is_accumulated():
    model = accumulate(BringsItsCallbacks(dense_model().layers))
    model.compile("sgd", "mse")
    model.fit(*dense_data(12), epochs=2, verbose=0)
    assert model.brought.epoch == [0, 1]


def test_a_model_without_trainable_weights_trains_as_plain_keras_does():
    x, y = dense_data(12)
    model = accumulate(dense_model(), accumulation_steps=3)
    model.trainable = False
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        model.fit(x, y, batch_size=4, verbose=0)


class Draws(keras.layers.Layer):
    """Takes anything, and draws unseeded numbers."""

    def __init__(self, is_ragged):
        super().__init__()
        self.kernel = self.add_weight(shape=(4, 2))
        self.is_ragged = is_ragged

    def call(self, x):
        x = tf.reduce_sum(x, 1) if self.is_ragged else x
        noise = 0.0 if self.is_ragged else tf.random.normal(tf.shape(x))
        return (x + noise) @ self.kernel


class OnlyDraws(keras.Model):
    def __init__(self, is_ragged):
        super().__init__()
        self.layer = Draws(is_ragged)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.layer(x) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("is_ragged", "why"),
    [(True, "it takes ragged or sparse tensors"), (False, "it draws unseeded random numbers, by")],
)
@pytest.mark.every_case
def test_calls_that_cannot_be_split_run_whole_and_are_named(is_ragged, why):
    x, y = dense_data(12)
    if is_ragged:
        x = tf.RaggedTensor.from_row_lengths(np.repeat(x, 2, 0), [1, 3] * 6)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    model = accumulate(OnlyDraws(is_ragged), microbatch_size=4)
    model.compile("sgd")
    with pytest.warns(UserWarning, match=why):
        model.fit(data, shuffle=False, verbose=0)
