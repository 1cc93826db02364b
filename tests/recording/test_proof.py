"""Steps of one's own that are proved to add up, with a `microbatch_size`.

They take one forward pass where others take two. Every other step runs on the full batch, which is
exact for any step: so a proof that is missing costs time, and a wrong one is wrong.
"""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, assert_changed, relative_difference, seeded, told
from keras import layers, losses, ops

from ga_model import accumulate
from ga_model.base._call_again import Attributes
from ga_model.batch._proof import adds_up
from ga_model.hearing._attributes import watch_attributes


def errors(z, y):
    return tf.reduce_mean(tf.square(z - y), -1)


def mean_square(z, y):
    return tf.reduce_mean(tf.square(z - y))


def rows(z):
    return tf.cast(tf.shape(z)[0], z.dtype)


class Step(keras.Model):
    """A step whose parts the subclasses change."""

    inner = ()
    of_outputs = staticmethod(mean_square)

    def __init__(self):
        super().__init__()
        inner = [make() for make in self.inner]
        hidden = [keras.Input((4,)), layers.Dense(6, activation="tanh"), *inner]
        self.net = keras.Sequential([*hidden, layers.Dense(2)])
        self.tracker = keras.metrics.Mean(name="tracked")
        self.more()

    def more(self):
        pass

    def call(self, x, training=None):
        return self.net(x, training=training)

    def compile_args(self):
        return {}

    def loss_of(self, x, y):
        return self.of_outputs(self.net(x, training=True), y)

    def work_over(self, gradients):
        return gradients

    def logs(self, loss, x, y):
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        variables = self.net.trainable_variables
        gradients = self.work_over(tape.gradient(loss, variables))
        self.optimizer.apply(gradients, variables)
        return self.logs(loss, x, y)


def step(base=Step, **attributes):
    return type("OtherStep", (base,), attributes)


def of_loss(loss):
    return step(of_outputs=staticmethod(loss))


def with_layer(make, **attributes):
    return step(inner=(make,), **attributes)


def plus_losses(self, x, y):
    return mean_square(self.net(x, training=True), y) + sum(self.net.losses)


class Guide(Step):
    """As in Keras's guides."""

    def compile_args(self):
        return {"loss": "mse", "metrics": ["mae"]}

    def loss_of(self, x, y):
        self.given = self(x, training=True)
        return self.compute_loss(x=x, y=y, y_pred=self.given)

    def logs(self, loss, x, y):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            elif metric.name != "tracked":
                metric.update_state(y, self.given)
        return {metric.name: metric.result() for metric in self.metrics[:1]}


class Compiled(Step):
    """Keras's step, with a loss of its own."""

    train_step = keras.Model.train_step

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return mean_square(y_pred, y) + 0.1 * ops.mean(ops.abs(y_pred))


class Sampling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, mean, log_variance):
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


class VAE(Step):
    """With noise that is zero: other numbers are drawn for microbatches than for the full batch."""

    scale = 0.0

    def more(self):
        inputs = keras.Input((4,))
        hidden = layers.Dense(5, activation="tanh")(inputs)
        mean, log_variance = layers.Dense(3)(hidden), layers.Dense(3)(hidden)
        noise = layers.Rescaling(self.scale)(
            Sampling()(layers.Subtract()([mean, mean]), log_variance)
        )
        self.encoder = keras.Model(inputs, [mean, log_variance, layers.Add()([mean, noise])])
        self.decoder = keras.Sequential([keras.Input((3,)), layers.Dense(4)])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            mean, log_variance, z = self.encoder(x, training=True)
            of_outputs = ops.mean(ops.sum(ops.square(x - self.decoder(z)), axis=1))
            kl = -0.5 * (1.0 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl = ops.mean(ops.sum(kl, axis=1))
            loss = of_outputs + 0.1 * kl + mean_square(self.net(x), y)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {**self.logs(loss, x, y), "kl": kl}


class Distills(Step):
    def more(self):
        self.teacher = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        self.teacher.trainable = False

    def loss_of(self, x, y):
        taught, z = self.teacher(x, training=False), self.net(x, training=True)
        soft = losses.KLDivergence()(tf.nn.softmax(taught / 3.0), tf.nn.softmax(z / 3.0))
        of_labels = losses.CategoricalCrossentropy(from_logits=True)(tf.nn.softmax(y), z)
        return 0.3 * of_labels + 0.7 * 9.0 * soft


def masked(z, y):
    mask = tf.cast(y[:, 0] > 0.5, z.dtype)  # of nothing in some microbatches
    return tf.math.divide_no_nan(tf.reduce_sum(errors(z, y) * mask), tf.reduce_sum(mask))


PROVED = {
    "mean": Step,
    "masked": of_loss(masked),
    "sum": of_loss(lambda z, y: tf.reduce_sum(tf.square(z - y))),
    "VAE": VAE,
    "distillation": Distills,
    "the guides'": Guide,
    "compute_loss": Compiled,
    "labels": of_loss(
        lambda z, y: tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y[:, 0] > 0, tf.int32), z)
        )
    ),
    "a loss of Keras": of_loss(lambda z, y: losses.Huber()(y, z)),
    "regularizers": with_layer(
        functools.partial(
            layers.Dense, 6, kernel_regularizer="l2", activity_regularizer=keras.regularizers.L2()
        ),
        loss_of=plus_losses,
    ),
    "an activation": with_layer(lambda: layers.Dense(6, activation=lambda z: tf.sin(z))),
    "clipped values": of_loss(lambda z, y: tf.reduce_mean(tf.minimum(errors(z, y), 1.0))),
}


def data():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(44, 4)), generator.normal(size=(44, 2))
    y[5:15] = -1.0
    return x, y


def fit(make, settings):
    model = seeded(make)
    start = model.get_weights()
    model = accumulate(model, **settings) if settings else model
    model.compile(keras.optimizers.Adam(0.01), **model.compile_args())
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(24)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        history = model.fit(batches, shuffle=False, verbose=0).history
    return model, start, history, told(caught)


@pytest.mark.parametrize("name", PROVED)
def test_steps_that_are_proved_match_by_one_pass(name, float64, monkeypatch):
    reference, start, expected, _ = fit(PROVED[name], {})
    monkeypatch.setattr("ga_model.calls._calls.SplitCall", None)  # of the way with a second pass
    model, _, history, said = fit(PROVED[name], {"microbatch_size": 5})
    assert_changed(reference.get_weights(), start)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE["float64"]
    assert history.keys() == expected.keys()
    for key in expected:
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-12)
    assert said == []


# Steps that run on the full batch.


class Centers(layers.Layer):
    def call(self, x):
        return x - tf.reduce_mean(x, 0)


class Whitens(layers.Layer):
    """By an operation of which nothing is known."""

    def call(self, x):
        gram = tf.matmul(x, x, transpose_a=True)
        return tf.matmul(x, tf.linalg.inv(gram + tf.eye(6, dtype=x.dtype)))


class Counts(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x * self.count


class Ranks:
    """An activation that is no function."""

    def __call__(self, z):
        return tf.matmul(tf.linalg.inv(tf.matmul(z, z, transpose_b=True)), z)


class Adds(layers.Layer):
    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def call(self, x):
        self.add_loss(self.reduction(tf.square(x)))
        return x


@tf.custom_gradient
def clipped(x):
    return tf.identity(x), lambda gradient: tf.clip_by_norm(gradient, 0.01)


class Clips(layers.Layer):
    def call(self, x):
        return clipped(x)


class Latest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="latest")
        self.value = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, values, sample_weight=None):
        self.value.assign(0.5 * self.value + tf.reduce_mean(values))

    def result(self):
        return self.value + 0.0


class UsesInputGradients(Step):
    def loss_of(self, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = mean_square(self.net(x), y)
        return mean_square(self.net(x + 0.5 * tape.gradient(loss, x)), y)


class PassesBack(Step):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            z = self.net(x)
        with tf.GradientTape() as of_loss:
            of_loss.watch(z)
            loss = mean_square(z, y)
        variables = self.net.trainable_variables
        upstream = of_loss.gradient(loss, z)
        self.optimizer.apply(tape.gradient(z, variables, output_gradients=upstream), variables)
        return {"loss": loss}


class Alternates(Step):
    def more(self):
        self.second = keras.optimizers.SGD(0.1)

    def train_step(self, data):
        x, y = data
        parts = self.net.trainable_variables[:2], self.net.trainable_variables[2:]
        for optimizer, variables in zip((self.optimizer, self.second), parts):
            with tf.GradientTape() as tape:
                loss = mean_square(self.net(x), y)
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Twice(Step):
    def train_step(self, data):
        return [super(Twice, self).train_step(data) for _ in range(2)][-1]


class LogsItsScaledLoss(Step):
    def loss_of(self, x, y):
        return self.optimizer.scale_loss(super().loss_of(x, y))

    def logs(self, loss, x, y):
        return {"loss": loss}


def logs(function):
    return step(logs=function)


def tracked_after(self, loss, x, y):
    result = self.tracker.result()
    self.tracker.update_state(loss)
    return {"loss": result}


def reset(self, loss, x, y):
    self.tracker.reset_state()
    return Step.logs(self, loss, x, y)


def assigned(self, loss, x, y):
    self.average.assign(0.9 * self.average + 0.1 * self.net.trainable_variables[0])
    return {"loss": loss}


def printed(self, loss, x, y):
    tf.print("a line for each batch", output_stream="file:///dev/null")
    return {"loss": loss}


def slower(self, loss, x, y):
    self.optimizer.learning_rate.assign(0.9 * self.optimizer.learning_rate)
    return {"loss": loss}


def has_own_average(self):
    self.average = tf.Variable(tf.zeros((4, 6), keras.config.floatx()), trainable=False)


def has_seed(self):
    self.seed = keras.random.SeedGenerator(1)


def has(metric):
    def more(self):
        self.other = metric()

    def logged(self, loss, x, y):
        self.other.update_state(y)
        return {"other": self.other.result()}

    return step(more=more, logs=logged)


NOT_PROVED = {
    # of losses
    "root": of_loss(lambda z, y: tf.sqrt(mean_square(z, y))),
    "times the number": of_loss(lambda z, y: mean_square(z, y) * rows(z)),
    "by the square of the number": of_loss(
        lambda z, y: tf.reduce_sum(errors(z, y)) / (rows(z) * rows(z))
    ),
    "all pairs": of_loss(lambda z, y: tf.reduce_mean(tf.matmul(z, y, transpose_b=True) ** 2)),
    "neighbours": of_loss(lambda z, y: mean_square(z, tf.reverse(z, [0]))),
    "pairs": of_loss(lambda z, y: mean_square(*tf.unstack(tf.reshape(z, [-1, 2, 2]), axis=1))),
    "halves": of_loss(lambda z, y: mean_square(*tf.split(z, 2))),
    "places": of_loss(lambda z, y: tf.reduce_mean(errors(z, y) * tf.range(rows(z), dtype=z.dtype))),
    "by the outputs": of_loss(lambda z, y: tf.reduce_sum(errors(z, y)) / tf.reduce_sum(tf.abs(z))),
    "by weights of any sign": of_loss(
        lambda z, y: tf.reduce_sum(errors(z, y) * y[:, 0]) / tf.reduce_sum(y[:, 0])
    ),
    "of two kinds": of_loss(lambda z, y: masked(z, y) + mean_square(z, y)),
    "a mean and a sum": of_loss(lambda z, y: mean_square(z, y) + tf.reduce_sum(z**2)),
    "a sum and weights": with_layer(
        functools.partial(layers.Dense, 6, kernel_regularizer="l2"),
        loss_of=lambda self, x, y: 48 * tf.reduce_sum(plus_losses(self, x, y) + 0.0 * x),
    ),
    "the dice": of_loss(lambda z, y: losses.Dice()(tf.sigmoid(y), tf.sigmoid(z))),
    "Python": of_loss(
        lambda z, y: mean_square(
            z, tf.ensure_shape(tf.numpy_function(lambda y: y / y.max(), [y], y.dtype), y.shape)
        )
    ),
    # of state
    "a metric": step(
        loss_of=lambda self, x, y: self.of_outputs(self.net(x), y) + self.tracker.result()
    ),
    "noise of the step": step(
        more=has_seed,
        loss_of=lambda self, x, y: mean_square(
            self.net(x + keras.random.normal(tf.shape(x), seed=self.seed)), y
        ),
    ),
    "noise of a layer": step(
        more=lambda self: setattr(self, "noise", layers.GaussianNoise(0.1, seed=1)),
        loss_of=lambda self, x, y: mean_square(self.net(self.noise(x, training=True)), y),
    ),
    "an average": step(more=has_own_average, logs=assigned),
    "a learning rate": logs(slower),
    "a line": logs(printed),
    # of layers
    "a layer that centers": with_layer(Centers),
    "a layer that whitens": with_layer(Whitens),
    "a layer that counts": with_layer(Counts),
    "a layer that clips": with_layer(Clips),
    "a layer that adds a root": with_layer(
        lambda: Adds(lambda x: tf.sqrt(tf.reduce_mean(x))), loss_of=plus_losses
    ),
    "a layer that adds a sum": with_layer(lambda: Adds(tf.reduce_sum), loss_of=plus_losses),
    "an activation": with_layer(lambda: layers.Dense(6, activation=lambda z: tf.sort(z, axis=0))),
    "an activation of a class": with_layer(lambda: layers.Dense(6, activation=Ranks())),
    "a function": with_layer(lambda: layers.Lambda(lambda z: z - tf.reverse(z, [0]))),
    "along the samples": with_layer(lambda: layers.Softmax(axis=0)),
    "normalization": with_layer(layers.BatchNormalization),
    "spectral": with_layer(lambda: layers.SpectralNormalization(layers.Dense(6))),
    # of gradients and updates
    "clipped": step(work_over=lambda self, g: tf.clip_by_global_norm(g, 0.1)[0]),
    "decayed": step(work_over=lambda self, g: [part + 0.1 for part in g]),
    "of inputs": UsesInputGradients,
    "passed back": PassesBack,
    "alternating": Alternates,
    "twice": Twice,
    # of logs
    "a maximum": logs(lambda self, loss, x, y: {"a": tf.reduce_max(y)}),
    "a number": logs(lambda self, loss, x, y: {"a": tf.reduce_sum(tf.cast(y > 0, tf.int32))}),
    "the samples": logs(lambda self, loss, x, y: {"a": rows(x)}),
    "after the update": logs(lambda self, loss, x, y: {"a": self.of_outputs(self.net(x), y)}),
    "iterations": logs(lambda self, loss, x, y: {"a": self.optimizer.iterations + 0}),
    "twice a metric": logs(
        lambda self, loss, x, y: {"a": 2.0 * Step.logs(self, loss, x, y)["loss"]}
    ),
    "twice Keras's metric": step(
        Compiled,
        train_step=lambda self, data: {"twice": 2.0 * keras.Model.train_step(self, data)["loss"]},
    ),
    "the metric before": logs(tracked_after),
    "a metric that is reset": logs(reset),
    "a metric of a maximum": logs(lambda self, loss, x, y: Step.logs(self, tf.reduce_max(y), x, y)),
    "a metric of the user's": has(Latest),
    "a scaled loss": LogsItsScaledLoss,
}


def is_proved(make, leaves):
    """Return whether the step of a model is proved to add up, for data of such specs."""
    model = accumulate(seeded(make), microbatch_size=5)
    model.compile(keras.optimizers.Adam(0.01), **model.compile_args())
    watch_attributes(model)
    found = []

    def draw(*data):
        found.append(adds_up(model, functools.partial(make.train_step, model), data))

    tf.function(draw, autograph=False).get_concrete_function(*leaves)
    return found[0]


def specs(x=None, y=None, dtype=None):
    dtype = dtype or keras.config.floatx()
    return tf.TensorSpec([x, 4], dtype), tf.TensorSpec([y, 2], dtype)


@pytest.mark.parametrize("name", NOT_PROVED)
def test_other_steps_are_not_proved(name, float64):
    assert not is_proved(NOT_PROVED[name], specs())


def test_parts_of_other_numbers_of_samples_are_not_proved(float64):
    assert is_proved(Step, specs(12, 12))
    assert not is_proved(Step, specs(12, 6))

    class Unlabelled(Step):
        def loss_of(self, x, y):
            return tf.reduce_mean(tf.square(self.net(x))) + tf.reduce_mean(tf.abs(y))

    assert not is_proved(Unlabelled, specs())  # which may have other numbers then


def test_what_tensorflow_tracks_is_put_back():
    """Attributes that are set on a `tf.Module` are wrapped, by proxies and copies."""
    module = tf.Module()
    module.counts, module.seen = {"calls": 0, "rows": [8]}, [1, 2]
    before = Attributes([module])
    module.counts["calls"] = 1
    module.counts["rows"].append(5)
    module.seen.append(3)
    before.put_back()
    assert (module.counts, module.seen) == ({"calls": 0, "rows": [8]}, [1, 2])
