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
from own_steps import TwoOptimizers
from training import difference_of_fits, train_pair

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
        (Distance, False),
        (Distance, True),
        (OwnLoss, False),
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
        (TwoOptimizers, "subclass"),
        (TwoOptimizers, "wrapped before compile"),
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
        return pytest.warns(UserWarning, match="'adam' and then computes with .* before it applies")
    return contextlib.nullcontext()


# The steps that the field writes. All data that would be drawn at random comes with the batch, so
# that the full batch draws the same.

SETTINGS = [{"accumulation_steps": 3}, {"microbatch_size": 4}]


class WassersteinGAN(keras.Model):
    """Critic and generator with a gradient penalty and metrics of their own (arXiv 1704.00028)."""

    def __init__(self):
        super().__init__()
        self.critic, self.generator = dense_model(4, 1), dense_model(3, 4)
        self.critic_metric = keras.metrics.Mean(name="critic_loss")
        self.generator_metric = keras.metrics.Mean(name="generator_loss")

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.generator_optimizer = generator_optimizer

    @property
    def metrics(self):
        return [self.critic_metric, self.generator_metric]

    def call(self, noise):
        return self.critic(self.generator(noise))

    def gradient_penalty(self, real, fake, position):
        mixed = real + position * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            score = self.critic(mixed, training=True)
        slope = tf.norm(tape.gradient(score, mixed), axis=1)
        return tf.reduce_mean(tf.square(slope - 1.0))

    def critic_loss(self, real, noise, position):
        fake = self.generator(noise, training=True)
        gap = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
        return gap + 10.0 * self.gradient_penalty(real, fake, position)

    def generator_loss(self, noise):
        return -tf.reduce_mean(self.critic(self.generator(noise, training=True)))

    def train_step(self, data):
        real, (noise, position) = data
        variables = self.critic.trainable_variables
        with tf.GradientTape() as tape:
            critic_loss = self.critic_loss(real, noise, position)
        gradients = tape.gradient(critic_loss, variables)
        self.critic_optimizer.apply_gradients(zip(gradients, variables))
        variables = self.generator.trainable_variables
        with tf.GradientTape() as tape:
            generator_loss = self.generator_loss(noise)
        gradients = tape.gradient(generator_loss, variables)
        self.generator_optimizer.apply_gradients(zip(gradients, variables))
        self.critic_metric.update_state(critic_loss)
        self.generator_metric.update_state(generator_loss)
        return {m.name: m.result() for m in self.metrics}


class WassersteinGANAtOnce(WassersteinGAN):
    """Takes both gradients before it makes an update, as a window does."""

    def train_step(self, data):
        real, (noise, position) = data
        critic, generator = self.critic.trainable_variables, self.generator.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            critic_loss = self.critic_loss(real, noise, position)
            generator_loss = self.generator_loss(noise)
        gradients = tape.gradient(critic_loss, critic), tape.gradient(generator_loss, generator)
        self.critic_optimizer.apply(gradients[0], critic)
        self.generator_optimizer.apply(gradients[1], generator)
        self.critic_metric.update_state(critic_loss)
        self.generator_metric.update_state(generator_loss)
        return {m.name: m.result() for m in self.metrics}


@pytest.mark.gate
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_wasserstein_gan_with_gradient_penalty(settings, float64):
    rows = 36
    real, _ = dense_data(rows)
    noise, _ = dense_data(rows, features=3, seed=4)
    position = np.random.default_rng(5).random((rows, 1))
    trained, logs = [], []
    is_window = "accumulation_steps" in settings
    for plain in (None, WassersteinGANAtOnce if is_window else WassersteinGAN):
        model = seeded(plain or WassersteinGAN)
        batch = 12
        if plain is None:
            accumulate(model, **settings)
            batch //= settings.get("accumulation_steps", 1)
        adam = keras.optimizers.Adam
        model.compile(adam(0.01, beta_1=0.5), adam(0.02, beta_1=0.5))
        start = model.get_weights()
        with told_of_order(is_window and plain is None):
            history = model.fit(
                real, (noise, position), batch_size=batch, epochs=2, shuffle=False, verbose=0
            )
        assert model.critic_optimizer.iterations == model.generator_optimizer.iterations == 6
        trained.append(model.get_weights())
        logs.append(history.history)
    assert_changed(trained[1], start)
    assert relative_difference(*trained, start) <= TOLERANCE[float64]
    for name in ("critic_loss", "generator_loss"):
        np.testing.assert_allclose(logs[0][name], logs[1][name], rtol=1e-12)


class SimSiam(keras.Model):
    """Two views of each row, a stopped gradient, no labels (arXiv 2011.10566)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = dense_model(4, 3), dense_model(3, 3)
        self.loss_metric = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_metric]

    def call(self, views):
        return [(z, self.predictor(z)) for z in map(self.encoder, views)]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            (z1, p1), (z2, p2) = self(data[0], training=True)
            similarity = keras.losses.cosine_similarity
            loss = similarity(tf.stop_gradient(z1), p2) + similarity(tf.stop_gradient(z2), p1)
            loss = tf.reduce_mean(loss) / 2.0
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.loss_metric.update_state(loss)
        return {"loss": self.loss_metric.result()}


@keras.saving.register_keras_serializable("tests")
class Distiller(keras.Model):
    """Knowledge distillation by a `compute_loss` of its own (arXiv 1503.02531)."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = dense_model(4, 3), dense_model(4, 3)
        self.teacher.trainable = False

    def call(self, x, training=None):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        taught = tf.nn.softmax(self.teacher(x, training=False) / 3.0)
        distillation = keras.losses.kl_divergence(taught, tf.nn.softmax(y_pred / 3.0))
        return 0.1 * super().compute_loss(x, y, y_pred, sample_weight) + 0.9 * 9.0 * tf.reduce_mean(
            distillation
        )


def views(rows):
    x, _ = dense_data(rows)
    return (x * [1.0, 1.0, 0.5, 1.0], x * [0.5, 1.0, 1.0, 1.0]), np.zeros((rows, 1))


def labels(rows):
    return dense_data(rows)[0], np.random.default_rng(6).integers(0, 3, rows)


def distilled_arguments():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {**arguments(), "loss": loss, "metrics": ["sparse_categorical_accuracy"]}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("make", "make_arguments", "make_data"),
    [(SimSiam, arguments, views), (Distiller, distilled_arguments, labels)],
    ids=["self-supervised", "distillation"],
)
def test_one_network_learns_from_another(make, make_arguments, make_data, settings, float64):
    steps = settings.get("accumulation_steps", 1)
    model, reference, start = train_pair(
        make, make_arguments, make_data(36), rows=12 // steps, steps=steps, **size_of(settings)
    )
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[float64]
    for name, values in reference.history.history.items():
        np.testing.assert_allclose(model.history.history[name], values, rtol=1e-12, err_msg=name)


def size_of(settings):
    return {"size": settings.get("microbatch_size")}


class OwnMetrics(keras.Model):
    """Overrides what Keras's step calls, and does something else in training."""

    def __init__(self):
        super().__init__()
        self.net = dense_model()
        self.largest = keras.metrics.MeanMetricWrapper(
            lambda y, y_pred: tf.reduce_max(tf.abs(y - y_pred), axis=-1), name="largest"
        )

    def call(self, x, training=False):
        return self.net(x) * (2.0 if training else 1.0)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.largest.update_state(y, y_pred)
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "constant": 3.0}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_compute_metrics_and_training_are_honoured(settings, float64):
    steps = settings.get("accumulation_steps", 1)
    model, reference, start = train_pair(
        OwnMetrics,
        lambda: {**arguments(), "metrics": ["mae"]},
        dense_data(34),
        rows=12 // steps,
        steps=steps,
        fit_args={"validation_split": 0.25},
        **size_of(settings),
    )
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[float64]
    history, expected = model.history.history, reference.history.history
    assert list(history) == list(expected)
    assert {"largest", "constant", "val_largest", "mae"} <= set(history)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-12, err_msg=name)


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


@pytest.mark.filterwarnings("ignore:What a custom loss averages over")  # eagerly
def test_an_optimizer_that_is_applied_in_some_microbatches_of_a_batch_is_refused():
    x, y = dense_data(12)
    model = accumulate(AppliesInTurn(), microbatch_size=4, loss_over="microbatch")
    model.compile(keras.optimizers.SGD(), keras.optimizers.SGD())
    model.run_eagerly = True
    with pytest.raises(RuntimeError, match="must apply the same optimizers, in the same order"):
        model.fit(x, y, batch_size=12, verbose=0)


class Alternates(OwnLoss):
    """Uses one of its networks every other time, which only eager mode does."""

    def __init__(self, first):
        super().__init__()
        self.other, self.calls = dense_model(), first

    def call(self, x):
        self.calls += 1
        return self.net(x) + (self.other(x) if self.calls % 2 else 0.0)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning:keras")
@pytest.mark.filterwarnings("ignore:What a custom loss averages over")  # eagerly
def test_a_network_that_some_microbatches_leave_out(float64):
    x, y = dense_data(12)
    model, reference = (seeded(lambda: Alternates(first=0)) for _ in range(2))
    accumulate(model, microbatch_size=6, loss_over="microbatch")
    accumulate(reference, accumulation_steps=2)  # which has a buffer for it
    for m, rows in (model, 12), (reference, 6):
        m.compile("sgd", "mse", run_eagerly=True)
        m.calls = 0
        start = m.get_weights()
        m.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[float64]
    model.calls = 1
    with pytest.raises(RuntimeError, match="has no gradient in the first microbatch"):
        model.fit(x, y, batch_size=12, shuffle=False, verbose=0)


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


def test_a_sum_with_regularizers_in_a_step_without_scale_loss_is_warned_of():
    x, y = dense_data(12)
    model = Distance()
    model.net.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
    model.net.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
    accumulate(model, accumulation_steps=3)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile("sgd", loss, run_eagerly=True)
    with pytest.warns(
        UserWarning, match="accumulated correctly only if `train_step` calls"
    ) as caught:
        model.fit(x, y, batch_size=4, verbose=0)
    assert [w.category for w in caught].count(UserWarning) == 1
