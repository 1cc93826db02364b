"""Losses of a step of one's own, in windows of several batches: exact, or told of.

What a loss averages over is read from the graph of the step. References are plain Keras on the
full batch.
"""

import contextlib
import itertools
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    MeanOfSquares,
    assert_changed,
    mirrored,
    relative_difference,
    seeded,
    told,
)
from keras import layers, losses, ops
from own_steps import STEPS, OwnLoss
from own_training import difference as difference_of_trainings
from own_training import train

from ga_model import accumulate
from ga_model.reading._denominators import by_kind
from ga_model.reading._operations import value_of
from ga_model.reading._step_loss import StepReading


def errors(z, y):
    return tf.reduce_mean(tf.square(z - y), -1)


def by_axis(views):
    return errors(views[0], views[1])


def joined(y):
    return tf.concat([y, tf.zeros_like(y)], 0)


def total(values):
    return tf.reduce_sum(values)


def number(z):
    return tf.cast(tf.shape(z)[0], z.dtype)


def python(z):
    values = tf.numpy_function(lambda z: np.abs(z).mean() + 0 * z[:, 0], [z], z.dtype)
    return tf.ensure_shape(values, z.shape[:1])


def python_of_tf(z):
    values = tf.py_function(lambda z: tf.reduce_mean(tf.abs(z)) + 0 * z[:, 0], [z], z.dtype)
    return tf.stop_gradient(tf.ensure_shape(values, z.shape[:1]))


def cosines(z, y):
    return z @ tf.transpose(y)


@tf.function
def nested_mean(z, y):
    return tf.reduce_mean(errors(z, y))


@tf.function
def nested_sum(z, y):
    if tf.shape(z)[1] > 2:
        return total(errors(z, y))
    return total(tf.abs(z - y))


@tf.function
def nested_mask(z, y, m):
    return total(errors(z, y) * m) / (total(m) + 1.0)


@tf.function
def nested_root(z, y):
    return tf.sqrt(tf.reduce_mean(errors(z, y)))


SETTING = tf.Variable([1.0, 2.0], trainable=False)
SAMPLES, WEIGHTS = (tf.TensorSpec(shape, tf.float64) for shape in ((None, 3), (None,)))

# Of outputs, targets and a mask, which some batches have nothing of.
EXACT = {
    "mean": lambda z, y, m: tf.reduce_mean(tf.square(z - y)),
    "means": lambda z, y, m: tf.reduce_mean(errors(z, y)) + 0.3 * tf.reduce_mean(tf.abs(z)),
    "values": lambda z, y, m: errors(z, y),
    "sum": lambda z, y, m: total(tf.square(z - y)),
    "sum by samples": lambda z, y, m: total(errors(z, y)) / tf.cast(tf.shape(z)[0], z.dtype),
    "sum by entries": lambda z, y, m: total(tf.square(z - y)) / tf.cast(tf.size(z), z.dtype),
    "masked": lambda z, y, m: total(errors(z, y) * m) / total(m),
    "all, over those of a mask": lambda z, y, m: (
        (total(errors(z, y)) + total(m * tf.abs(z[:, 0]))) / tf.maximum(total(m), 1.0)
    ),
    "all, over a mask and epsilon": lambda z, y, m: total(errors(z, y)) / (total(m) + 1e-3),
    "two masked": lambda z, y, m: (
        total(errors(z, y) * m) / (total(m) + 1e-3)
        + 0.3 * total(tf.abs(z[:, 0]) * m) / (total(m) + 1e-3)
    ),
    "chosen twice": lambda z, y, m: (
        tf.reduce_mean(tf.boolean_mask(errors(z, y), m > 0))
        + 0.3 * tf.reduce_mean(tf.boolean_mask(tf.abs(z), m > 0))
    ),
    "nested": lambda z, y, m: 2.0 * nested_mean(z, y),
    "nested sum": lambda z, y, m: nested_sum(z, y) / number(z),
    "branches": lambda z, y, m: tf.cond(
        tf.reduce_sum(SETTING) > 0,
        lambda: tf.reduce_mean(errors(z, y)),
        lambda: tf.reduce_mean(tf.abs(z)),
    ),
    "masked, epsilon": lambda z, y, m: total(errors(z, y) * m) / (total(m) + 1e-3),
    "masked, at least one": lambda z, y, m: total(errors(z, y) * m) / tf.maximum(total(m), 1.0),
    "masked, no NaN": lambda z, y, m: tf.math.divide_no_nan(total(errors(z, y) * m), total(m)),
    "means of a mask": lambda z, y, m: tf.reduce_mean(errors(z, y) * m) / tf.reduce_mean(m),
    "boolean mask": lambda z, y, m: tf.reduce_mean(tf.boolean_mask(errors(z, y), m > 0)),
    "weights": lambda z, y, m: total(tf.abs(y[:, 0]) * errors(z, y)) / total(tf.abs(y[:, 0])),
    "keras.ops": lambda z, y, m: ops.mean(ops.sum(ops.square(z - y), axis=-1)),
    "a function of Keras": lambda z, y, m: ops.mean(losses.huber(y, z)),
    "a loss of Keras": lambda z, y, m: losses.MeanSquaredError()(y, z),
    "with weights": lambda z, y, m: losses.MeanSquaredError()(y, z, sample_weight=m),
    "a sum of Keras": lambda z, y, m: losses.MeanSquaredError(reduction="sum")(y, z),
    "average loss": lambda z, y, m: tf.nn.compute_average_loss(errors(z, y), global_batch_size=24),
    "two views": lambda z, y, m: tf.reduce_mean(errors(tf.concat([z, 2 * z], 0), joined(y))),
    "real and fake": lambda z, y, m: losses.BinaryCrossentropy(from_logits=True)(
        tf.concat([tf.ones((tf.shape(z)[0], 1)), tf.zeros((tf.shape(z)[0], 1))], 0),
        tf.reduce_sum(tf.concat([z, -z], 0) ** 3, -1, keepdims=True),
    ),
    "some of them twice": lambda z, y, m: tf.reduce_mean(
        errors(*(tf.concat([a, tf.boolean_mask(a, y[:, 0] > 0)], 0) for a in (z, y)))
    ),
    "halves again": lambda z, y, m: tf.reduce_mean(errors(*tf.split(tf.concat([z, y], 0), 2))),
    "slices again": lambda z, y, m: (
        tf.reduce_mean(tf.nn.softplus(tf.concat([z, y, -z], 0)[: tf.shape(z)[0]]))
        + tf.reduce_mean(tf.square(tf.concat([y, z + y, z], 0)[tf.shape(z)[0] :]))
    ),
    "parts of given sizes": lambda z, y, m: (
        tf.reduce_mean(errors(*tf.split(tf.concat([z, y], 0), [tf.shape(z)[0], tf.shape(z)[0]])))
        + tf.reduce_mean(tf.split(tf.concat([z, z * y, y], 0), [-1, 2 * tf.shape(z)[0]])[1] ** 2)
    ),
    "slices from the end": lambda z, y, m: tf.reduce_mean(
        errors(tf.concat([z, y], 0)[: -tf.shape(z)[0]], tf.concat([z, y], 0)[-tf.shape(z)[0] :])
    ),
    "halves by their number": lambda z, y, m: tf.reduce_mean(
        errors(tf.concat([z, y], 0)[: tf.shape(joined(z))[0] // 2], y)
    ),
    "views on an axis": lambda z, y, m: tf.reduce_mean(
        errors(*tf.unstack(tf.reshape(tf.concat([z, y], 0), [2, -1, z.shape[1]])))
        + by_axis(tf.reshape(tf.concat([z, 2 * y], 0), [2, tf.shape(z)[0], z.shape[1]]))
    ),
    "views that were stacked": lambda z, y, m: tf.reduce_mean(
        by_axis(
            tf.reshape(tf.reshape(tf.stack([z, y]), [-1, z.shape[1]]) ** 2, [2, -1, z.shape[1]])
        )
        + errors(*tf.split(tf.reshape(tf.stack([z, 2 * y]), [-1, z.shape[1]]), 2))
    ),
    "views in the same shape": lambda z, y, m: tf.reduce_mean(
        errors(*tf.split(tf.reshape(tf.concat([z, y], 0), [-1, z.shape[1]]), 2))
    ),
    "views in parts and back": lambda z, y, m: tf.reduce_mean(
        errors(
            *tf.split(tf.reshape(tf.reshape(tf.concat([z, y], 0), [-1, 1]), [-1, z.shape[1]]), 2)
        )
    ),
    "a product with each part of views": lambda z, y, m: tf.reduce_mean(
        tf.tensordot(tf.concat([z, y], 0)[..., None], tf.ones((1, 5), z.dtype), 1) ** 2
    ),
    "pairs of views": lambda z, y, m: tf.reduce_mean(
        tf.reduce_prod(
            tf.reshape(tf.reshape(tf.stack([z, y], 1), [-1, z.shape[1]]), [-1, 2, z.shape[1]]), 1
        )
    ),
    "halves of the size": lambda z, y, m: total(errors(z, y)) / (0.5 * number(z)),
    "times a number": lambda z, y, m: 100.0 / number(z) * total(errors(z, y)),
    "each by the number": lambda z, y, m: total(errors(z, y) / number(z)),
    "a mean of the number": lambda z, y, m: tf.reduce_mean(errors(z, y) * number(z)),
    "number and epsilon": lambda z, y, m: total(errors(z, y)) / (number(z) + 1e-2),
    "one sample less": lambda z, y, m: total(errors(z, y)) / (number(z) - 1.0),
    "masked, one less": lambda z, y, m: total(errors(z, y) * m) / (total(m) - 0.5),
    "masked, at least ten": lambda z, y, m: total(errors(z, y) * m) / tf.maximum(total(m), 10.0),
    "at least a hundred": lambda z, y, m: total(errors(z, y)) / tf.maximum(number(z), 100.0),
    "chosen, at least one": lambda z, y, m: (
        total(tf.boolean_mask(errors(z, y), m > 0))
        / tf.maximum(number(tf.boolean_mask(z, m > 0)), 1.0)
    ),
    "small weights": lambda z, y, m: (
        total(0.02 * tf.abs(y[:, 0]) * errors(z, y))
        / tf.maximum(total(0.02 * tf.abs(y[:, 0])), 1.0)
    ),
    "by their size": lambda z, y, m: total(errors(z, y)) / tf.cast(tf.size(z), z.dtype),
    "a constant less": lambda z, y, m: total(errors(z, y)) - 3.0 - (2.0 - total(z**2)),
    "squares": lambda z, y, m: tf.nn.l2_loss(z - y) / number(z),
    "einsum": lambda z, y, m: tf.einsum("ij,ij->", z - y, z) + tf.reduce_sum(z**2),
    "sum and a constant": lambda z, y, m: total(errors(z, y)) + 3.0,
    "stopped": lambda z, y, m: tf.reduce_mean(errors(z, y)) + tf.stop_gradient(total(z) ** 2),
}
TOLD = {
    "nested mask": lambda z, y, m: nested_mask(z, y, m),
    "nested root": lambda z, y, m: nested_root(z, y),
    "times the square of the number": lambda z, y, m: total(errors(z, y)) / number(z) / number(z),
    "by the square of the number": lambda z, y, m: total(errors(z, y)) / (number(z) * number(z)),
    "means by the number": lambda z, y, m: tf.reduce_mean(errors(z, y) / number(z)),
    "a part by the number": lambda z, y, m: tf.reduce_mean(
        errors(z, y) + tf.abs(z[:, 0]) / number(z)
    ),
    "by what is left": lambda z, y, m: total(errors(z, y) * m) / (30.0 - total(m)),
    "at most ten": lambda z, y, m: total(errors(z, y)) / tf.minimum(number(z), 10.0),
    "odd halves": lambda z, y, m: tf.reduce_mean(errors(z, y)[: tf.shape(z)[0] // 2 * 2][1:]),
    "Python": lambda z, y, m: tf.reduce_mean(errors(z, y) * python(z)),
    "Python of TensorFlow": lambda z, y, m: tf.reduce_mean(errors(z, y) * python_of_tf(z)),
    "a Gram matrix": lambda z, y, m: total(tf.matmul(z, y, transpose_a=True) ** 2),
    "a part of both": lambda z, y, m: tf.reduce_mean(
        tf.square(tf.split(tf.concat([z, y], 0)[tf.shape(z)[0] // 2 :][: tf.shape(z)[0]], 2)[0])
    ),
    "triples across views": lambda z, y, m: tf.reduce_mean(
        tf.reduce_prod(tf.reshape(tf.concat([z, y, z], 0), [-1, 3, z.shape[1]]), 1)
    ),
    "views by the number of samples": lambda z, y, m: tf.reduce_mean(
        tf.reduce_prod(tf.reshape(tf.concat([z, y, z], 0), [tf.shape(z)[0], -1]), 1)
    ),
    "triples across views that were turned": lambda z, y, m: tf.reduce_mean(
        tf.reduce_prod(
            tf.reshape(tf.transpose(tf.transpose(tf.concat([z, y, z], 0))), [-1, 3, z.shape[1]]),
            1,
        )
    ),
    "parts beside samples": lambda z, y, m: tf.reduce_mean(
        errors(
            *tf.unstack(tf.reshape(tf.concat([tf.reshape(z, [-1, 1]), y[:, :1]], 0), [2, -1, 1]))
        )
    ),
    "triples across stacked views": lambda z, y, m: tf.reduce_mean(
        tf.reduce_prod(
            tf.reshape(tf.reshape(tf.stack([z, y, z]), [-1, z.shape[1]]), [-1, 3, z.shape[1]]), 1
        )
    ),
    "triples across views in parts": lambda z, y, m: tf.reduce_mean(
        tf.reduce_prod(tf.reshape(tf.reshape(tf.concat([z, y, z], 0), [-1, 1]), [-1, 6]), 1)
    ),
    "slices within": lambda z, y, m: tf.reduce_mean(errors(z[: tf.shape(z)[0] // 2], 0.0)),
    "two views and one": lambda z, y, m: (
        tf.reduce_mean(errors(tf.concat([z, tf.boolean_mask(z, m > 0)], 0)[:, :1], 0.0))
        + tf.reduce_mean(errors(z, y))
    ),
    "halves": lambda z, y, m: tf.reduce_mean(errors(tf.concat([z, y], 0)[1:], joined(y)[:-1])),
    "root": lambda z, y, m: tf.sqrt(tf.reduce_mean(tf.square(z - y))),
    "variance": lambda z, y, m: tf.math.reduce_variance(z) + tf.reduce_mean(z**2),
    "contrastive": lambda z, y, m: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(z)[0]), cosines(z, y))
    ),
    "cross-correlation": lambda z, y, m: total(
        (cosines(tf.transpose(z), tf.transpose(y)) / tf.cast(tf.shape(z)[0], z.dtype)) ** 2
    ),
    "mean and sum": lambda z, y, m: tf.reduce_mean(errors(z, y)) + 0.01 * total(z**2),
    "exponential": lambda z, y, m: tf.exp(tf.reduce_mean(errors(z, y))),
    "weights of the outputs": lambda z, y, m: (
        total(tf.sigmoid(z[:, 0]) * errors(z, y)) / total(tf.sigmoid(z[:, 0]))
    ),
    "broadcast": lambda z, y, m: tf.reduce_mean(tf.square(z[:, :1] - y[:, 0])),
    "by the largest": lambda z, y, m: tf.reduce_mean(
        errors(z, y) / tf.stop_gradient(tf.reduce_max(errors(z, y)))
    ),
    "neighbours": lambda z, y, m: tf.reduce_mean((z - tf.roll(z, 1, 0)) ** 2),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", EXACT)
def test_gradients_of_parts_are_put_together_by_what_is_read(name, float64):
    """The algebra alone: of three parts of a batch, and of all of it."""

    @tf.function(autograph=False, input_signature=[SAMPLES, SAMPLES, WEIGHTS])
    def gradient(z, y, m):
        with tf.GradientTape() as tape:
            tape.watch(z)
            loss = EXACT[name](z, y, m)
        found = by_kind(StepReading(loss.graph, None, []).of(loss).denominators)
        (read,) = found.values()
        count = 0.0 if read.count is None else read.count
        divisor = count if read.divisor is None else read.divisor
        once = 0.0 if read.once is None else read.once
        numbers = [tf.cast(n, tf.float64) for n in (count, divisor, once, read.least)]
        return tf.convert_to_tensor(tape.gradient(loss, z)), numbers

    generator = np.random.default_rng(0)
    z, y = generator.normal(size=(2, 12, 3))
    m = generator.integers(0, 2, 12).astype("float64")
    m[::4] = 1.0  # each part has something of it
    whole, _ = gradient(z, y, m)
    parts = [gradient(z[rows], y[rows], m[rows]) for rows in np.split(np.arange(12), [4, 9])]
    is_sum = not parts[0][1][1]
    gradients = [g * (1.0 if is_sum else divisor) for g, (_, divisor, _, _) in parts]
    count = sum(float(numbers[0]) for _, numbers in parts)
    once, least = map(float, parts[0][1][2:])
    expected = 1.0 if is_sum else max(count + once, least)
    np.testing.assert_allclose(np.concatenate(gradients) / expected, whole, rtol=1e-10, atol=1e-14)


class OwnStep(keras.Model):
    def __init__(self, loss, hidden=None, **regularizers):
        super().__init__()
        self.of_outputs = loss
        hidden = hidden or [layers.Dense(6, activation="tanh", **regularizers)]
        self.net = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2)])

    def loss_of(self, x, y, mask):
        return self.of_outputs(self.net(x, training=True), y, mask)

    def work_over(self, gradients):
        return gradients

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
            loss = loss + sum(self.net.losses) if self.net.losses else loss
        variables = self.trainable_variables
        self.optimizer.apply(self.work_over(tape.gradient(loss, variables)), variables)
        return {"loss": tf.reduce_mean(loss)}


class Scales(OwnStep):
    """Passes its loss on to its optimizer before it takes the gradient."""

    def loss_of(self, *data):
        return self.optimizer.scale_loss(super().loss_of(*data))


def minus_its_mean(gradients):
    return [g - tf.reduce_mean(g, 0) for g in gradients]


def turn(gradient):
    size = gradient.shape[-1]
    return tf.constant(np.random.default_rng(0).normal(size=(size, size)), gradient.dtype)


def half(gradient):
    return tf.constant(np.indices(gradient.shape).sum(0) % 2 == 0)


LINEAR = {
    "scaled": lambda gradients: [2.0 * g for g in gradients],
    "checked": lambda gradients: [tf.debugging.check_numerics(g, "") for g in gradients],
    "minus its mean": minus_its_mean,
    "added": lambda gradients: [tf.add_n([g, 0.5 * g]) / 3.0 for g in gradients],
    "measured": lambda gradients: (tf.linalg.global_norm(gradients), gradients)[1],
    "turned": lambda gradients: [tf.einsum("...i,ij->...j", g, turn(g)) for g in gradients],
    "chosen": lambda gradients: [tf.where(half(g), g, tf.zeros_like(g)) for g in gradients],
    "reversed": lambda gradients: [tf.reverse(tf.cumsum(g), [0]) for g in gradients],
}
NOT_LINEAR = {
    "global norm": lambda gradients: tf.clip_by_global_norm(gradients, 0.1)[0],
    "norm": lambda gradients: [tf.clip_by_norm(g, 0.1) for g in gradients],
    "value": lambda gradients: [tf.clip_by_value(g, -0.1, 0.1) for g in gradients],
    "unit": lambda gradients: [g / tf.norm(g) for g in gradients],
    "sign": lambda gradients: [tf.sign(g) for g in gradients],
    "noise": lambda gradients: [
        g + 0.1 * tf.random.normal(g.shape, dtype=g.dtype) for g in gradients
    ],
    "scaled": lambda gradients: [g * tf.reduce_max(tf.abs(gradients[-1])) for g in gradients],
}


# Of a model, inputs, targets, and the gradient of a loss with respect to the inputs.
def moved(net, x, y, step):
    return tf.reduce_mean((net(x + tf.stop_gradient(step)) - y) ** 2)


def norms(gradient):
    return tf.norm(gradient, axis=1, keepdims=True)


OF_INPUTS_EXACT = {
    "a sum, as it is": (tf.reduce_sum, lambda net, x, y, g: moved(net, x, y, 0.5 * g)),
    "a sum, its norms": (
        tf.reduce_sum,
        lambda net, x, y, g: moved(net, x, y, 0.0 * x) + tf.reduce_mean((norms(g) - 1) ** 2),
    ),
    "its sign": (tf.reduce_mean, lambda net, x, y, g: moved(net, x, y, 0.5 * tf.sign(g))),
    "its direction": (tf.reduce_mean, lambda net, x, y, g: moved(net, x, y, g / norms(g))),
    "normalized": (
        tf.reduce_mean,
        lambda net, x, y, g: moved(net, x, y, tf.math.l2_normalize(g, 1)),
    ),
    "times the number": (
        tf.reduce_mean,
        lambda net, x, y, g: moved(net, x, y, number(x) * 0.5 * g),
    ),
}
OF_INPUTS_TOLD = {
    "as it is": (tf.reduce_mean, lambda net, x, y, g: moved(net, x, y, 5.0 * g)),
    "its norms": (
        tf.reduce_mean,
        lambda net, x, y, g: moved(net, x, y, 0.0 * x) + tf.reduce_mean((norms(g) - 1) ** 2),
    ),
    "its squares": (tf.reduce_mean, lambda net, x, y, g: moved(net, x, y, x) + total(g**2)),
    "of a root": (
        lambda errors: tf.sqrt(tf.reduce_mean(errors)),
        lambda net, x, y, g: moved(net, x, y, g),
    ),
}


class UsesGradientsOfInputs(OwnStep):
    """Moves its inputs along a gradient (1412.6572), or has one in its loss."""

    def __init__(self, reduction, use):
        super().__init__(None)
        self.reduction, self.use = reduction, use

    def loss_of(self, x, y, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.reduction(errors(self.net(x), y))
        return self.use(self.net, x, y, tape.gradient(loss, x))


class UsesJacobians(OwnStep):
    """Has the derivatives of outputs with respect to inputs in its loss."""

    def __init__(self, use_pfor, outputs_of):
        super().__init__(None)
        self.use_pfor, self.outputs_of = use_pfor, outputs_of

    def loss_of(self, x, y, mask):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            z = self.outputs_of(self.net(x))
        jacobian = tape.batch_jacobian(z, x, experimental_use_pfor=self.use_pfor)
        return tf.reduce_mean(errors(z, y)) + tf.reduce_mean(jacobian**2)


class OwnStepThatClips(OwnStep):
    work_over = staticmethod(NOT_LINEAR["norm"])


class WorksOver(OwnStep):
    """Makes something of its gradients."""

    def __init__(self, loss, work_over):
        super().__init__(loss)
        self.work_over = work_over


class Decays(OwnStep):
    """Adds to its gradients, by variables that it reads for the first time then."""

    def __init__(self, loss, rate=0.1):
        super().__init__(loss)
        self.rate = tf.Variable(rate, trainable=False, dtype=keras.config.floatx())

    def work_over(self, gradients):
        return [g + self.rate * w for g, w in zip(gradients, self.trainable_variables)]


class DecaysAndScales(Decays, Scales):
    """The same, with a loss that is scaled."""


def data():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(44, 4)), generator.normal(size=(44, 2))
    mask = (generator.uniform(size=44) > 0.5).astype(float)
    mask[8:16] = 0.0
    return x, y, mask


def fit(make, steps, is_static=False, settings=None, **compile_args):
    model = seeded(make)
    start = model.get_weights()
    if steps > 1 or settings:
        model = accumulate(model, accumulation_steps=steps, **(settings or {}))
    model.compile(keras.optimizers.Adam(0.01), **compile_args)
    model.optimizer.build(model.trainable_variables)
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(24 // steps, is_static)
    batches = batches.take(steps) if is_static else batches
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(batches, epochs=2, shuffle=False, verbose=0)
    return start, model.get_weights(), [str(warning.message) for warning in caught]


def difference(make, **kwargs):
    start, weights, said = fit(make, 3, **kwargs)
    kwargs.pop("settings", None)
    _, expected, _ = fit(make, 1, **kwargs)
    assert_changed(expected, start)
    return relative_difference(weights, expected, start), said


XLA = {"jit_compile": True}
WAYS = [{}, {"is_static": True}, {"settings": {"microbatch_size": 5}}]


def in_all_ways(names, ways, under_xla=()):
    """Parametrize `name` and `way`. XLA compiles what was read in the same way: it has a few."""
    pairs = [(name, way) for name in names for way in ways]
    return pytest.mark.parametrize(("name", "way"), [*pairs, *((name, XLA) for name in under_xla)])


@in_all_ways(EXACT, WAYS, ["mean", "masked, epsilon", "boolean mask", "real and fake"])
def test_losses_that_are_quotients_of_sums_match_without_a_word(name, way, float64):
    found, said = difference(lambda: OwnStep(EXACT[name]), **way)
    assert not said
    assert found < TOLERANCE[float64]


@pytest.mark.parametrize("name", ["views on an axis", "triples across views"])
@pytest.mark.every_case
def test_views_are_followed_and_their_border_is_told_of(name, float64):
    found, said = difference(lambda: OwnStep({**EXACT, **TOLD}[name]))
    assert len(said) == (name in TOLD)
    assert (found > 1e-4) == (name in TOLD)


@in_all_ways(OF_INPUTS_EXACT, [{}, {"is_static": True}])
def test_gradients_of_inputs_whose_length_does_not_matter_match(name, way, float64):
    found, said = difference(lambda: UsesGradientsOfInputs(*OF_INPUTS_EXACT[name]), **way)
    assert found < TOLERANCE["float64"]
    assert said == []


class SecondDerivatives(OwnStep):
    """Solves a differential equation: the second derivatives of outputs are in its loss."""

    def __init__(self):
        super().__init__(None)

    def loss_of(self, x, y, mask):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                z = tf.tanh(self.net(tf.tanh(x)))[:, :1]
            slopes = inner.gradient(z, x)
        curvatures = outer.gradient(slopes, x)
        return tf.reduce_mean(tf.square(curvatures[:, :1] + tf.tanh(z) - y[:, :1]))


@pytest.mark.parametrize("way", [{}, {"is_static": True}])
def test_second_derivatives_match_without_a_word(way, float64):
    found, said = difference(SecondDerivatives, **way)
    assert found < TOLERANCE[float64]
    assert said == []


@pytest.mark.parametrize("length", [100, 2000])
def test_the_value_of_a_long_chain_is_not_looked_for(length):
    """Each of its tensors is reached in 2 ** n ways, through n others."""
    with tf.Graph().as_default():
        chain = tf.raw_ops.Placeholder(dtype=tf.float64, shape=())
        for _ in range(length):
            chain = chain + chain
        assert value_of(chain) is None


@pytest.mark.parametrize("way", [{}, {"is_static": True}])
@pytest.mark.parametrize("use_pfor", [True, False])
def test_jacobians_of_samples_match_without_a_word(use_pfor, way, float64):
    found, said = difference(lambda: UsesJacobians(use_pfor, tf.math.softplus), **way)
    assert found < TOLERANCE[float64]
    assert said == []


def test_jacobians_of_what_mixes_samples_are_told_of(float64):
    def mixed(z):
        return z / tf.reduce_mean(tf.abs(z))

    found, said = difference(lambda: UsesJacobians(True, mixed))
    assert found > 1e-3
    assert len(said) == 1


@in_all_ways(OF_INPUTS_TOLD, [{}, {"is_static": True}])
def test_gradients_of_inputs_of_means_are_told_of(name, way, float64):
    found, said = difference(lambda: UsesGradientsOfInputs(*OF_INPUTS_TOLD[name]), **way)
    assert found > 1e-3
    assert len(said) == 1


@pytest.mark.parametrize("name", ["sum", "masked", "masked, epsilon"])
def test_steps_that_scale_match(name, float64):
    found, said = difference(lambda: Scales(EXACT[name]))
    assert not said
    assert found < TOLERANCE[float64]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("loss", ["sum", "masked, epsilon"])
def test_gradients_that_are_worked_over_linearly_match(loss, name, float64):
    found, said = difference(lambda: WorksOver(EXACT[loss], LINEAR[name]))
    assert not said
    assert found < TOLERANCE[float64]


@pytest.mark.parametrize("make", [Decays, DecaysAndScales])
@pytest.mark.parametrize("loss", ["mean", "masked", "masked, epsilon", "sum"])
def test_what_is_added_to_gradients_matches_where_the_weight_comes_after_it(loss, make, float64):
    found, said = difference(lambda: make(EXACT[loss]))
    if make is Decays and loss in ("mean", "masked"):
        assert not said
        assert found < TOLERANCE[float64]
    else:
        assert found > 1e-5
        assert ["adds a term to gradients" in text for text in said] == [True]
        assert f"{__file__}:" in said[0]


@pytest.mark.parametrize("settings", [{"microbatch_size": 7}, {"accumulation_steps": 3}])
def test_a_rule_of_the_users_does_not_cover_what_is_done_to_gradients(settings, float64):
    class Ruled(OwnStepThatClips):
        def microbatch_weight(self, x, y=None, sample_weight=None):
            return tf.shape(x)[0]

    steps = settings.get("accumulation_steps", 1)
    of_model = {name: value for name, value in settings.items() if name == "microbatch_size"}
    start, weights, said = fit(lambda: Ruled(EXACT["mean"]), steps, settings=of_model)
    _, expected, _ = fit(lambda: OwnStepThatClips(EXACT["mean"]), 1)
    found = relative_difference(weights, expected, start)
    if steps == 1:
        assert not said
        assert found < TOLERANCE[float64]
    else:
        assert found > 1e-3
        assert ["let the optimizer do it" in text for text in said] == [True]


@pytest.mark.parametrize("name", NOT_LINEAR)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_gradients_that_are_clipped_are_told_of_once(is_scaled, name, float64):
    class Clips(Scales if is_scaled else OwnStep):
        work_over = staticmethod(NOT_LINEAR[name])

    found, said = difference(lambda: Clips(EXACT["mean"]))
    assert found > 1e-3
    assert len(said) == 1
    assert "let the optimizer do it" in said[0]
    assert f"{__file__}:" in said[0]
    _, weights, said = fit(lambda: Clips(EXACT["mean"]), 1, settings={"microbatch_size": 7})
    assert not said
    if name != "noise":
        _, expected, _ = fit(lambda: Clips(EXACT["mean"]), 1)
        assert relative_difference(weights, expected, [0.0 * w for w in weights]) < 1e-12


@pytest.mark.parametrize("name", ["mean", "values", "masked"])
def test_beside_regularizers_means_match(name, float64):
    found, said = difference(lambda: OwnStep(EXACT[name], kernel_regularizer="l2"))
    assert not said
    assert found < TOLERANCE[float64]


def test_beside_regularizers_a_mean_of_nothing_matches(float64):
    """Then the gradient is that of the regularizers alone."""

    def mean_of_nothing(z, y, m):
        return tf.math.divide_no_nan(total(errors(z, y) * 0.0 * m), total(0.0 * m))

    found, said = difference(lambda: OwnStep(mean_of_nothing, kernel_regularizer="l2"))
    assert not said
    assert found < TOLERANCE[float64]


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [{"accumulation_steps": 3}, {"microbatch_size": 5}])
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_term_that_is_divided_by_zero_is_told_of_if_it_was_not_zero(is_lost, settings, float64):
    """Sample weights of both signs, which cancel out in the first microbatch."""
    x, y = np.ones((15, 4)), np.zeros((15, 2))
    weights = np.ones(15)
    weights[:5] = [1, -1, 2, -2, 0] if is_lost else 0
    model = accumulate(seeded(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)])))
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile("sgd", loss, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        size = 5 if "accumulation_steps" in settings else 15
        arguments = {"sample_weight": weights, "batch_size": size, "shuffle": False}
        model.fit(x, y, epochs=2, verbose=0, **arguments)
    said = told(caught)
    assert len(said) == is_lost, said
    assert all("because it was divided by zero" in text for text in said)


def test_a_sum_that_is_divided_by_the_number_of_none_is_told_of(float64):
    def of_all_over_some(z, y, m):
        return tf.math.divide_no_nan(total(errors(z, y)), total(tf.cast(y[:, 0] > 1.0, z.dtype)))

    _, said = difference(lambda: OwnStep(of_all_over_some))
    assert len(said) == 1
    assert "because it was divided by zero" in said[0]


def test_beside_losses_of_layers_means_match(float64):
    def make():
        adds = layers.Dense(4, "tanh", activity_regularizer=MeanOfSquares(0.01))
        return OwnStep(EXACT["mean"], [layers.Reshape((4, 1)), layers.GRU(3), adds])

    found, said = difference(make)
    assert not said
    assert found < TOLERANCE[float64]


@pytest.mark.parametrize("name", ["sum", "masked, epsilon"])
def test_beside_regularizers_what_is_no_mean_is_told_of(name, float64):
    _, said = difference(lambda: OwnStep(EXACT[name], kernel_regularizer="l2"))
    assert len(said) == 1


def test_numbers_that_are_drawn_by_a_fixed_seed_are_told(float64):
    def drawn(z, y, m):
        noise = tf.random.stateless_normal(tf.shape(z), [1, 2], dtype=z.dtype)
        return tf.reduce_mean(errors(z + noise, y))

    found, said = difference(lambda: OwnStep(drawn))
    assert found > 1e-3
    assert ["draws with a fixed seed" in text for text in said] == [True]


def test_a_loop_is_not_taken_for_random_numbers(float64):
    def looped(z, y, m):
        def add(i, loss):
            return i + 1, loss + tf.reduce_mean(errors(z, y))

        return tf.while_loop(lambda i, loss: i < 3, add, [0, tf.zeros((), z.dtype)])[1]

    _, said = difference(lambda: OwnStep(looped))
    assert len(said) == 1
    assert "fixed seed" not in said[0]


class PassesBack(OwnStep):
    """Takes the gradient of a model's outputs, and passes back that of the loss."""

    def train_step(self, data):
        x, y, _ = data
        with tf.GradientTape() as tape:
            z = self.net(x)
        with tf.GradientTape() as of_loss:
            of_loss.watch(z)
            loss = self.of_outputs(z, y, None)
        upstream, variables = of_loss.gradient(loss, z), self.net.trainable_variables
        self.optimizer.apply(tape.gradient(z, variables, output_gradients=upstream), variables)
        return {"loss": tf.reduce_mean(loss)}


@pytest.mark.parametrize("name", ["mean", "sum", "root"])
def test_gradients_that_are_passed_back_match_or_are_told_of(name, float64):
    found, said = difference(lambda: PassesBack({**EXACT, **TOLD}[name]))
    assert said if name == "root" else (found <= TOLERANCE["float64"] and not said)


@in_all_ways(TOLD, WAYS[:2], ["root", "contrastive"])
def test_other_losses_are_told_of_once(name, way, float64):
    found, said = difference(lambda: OwnStep(TOLD[name]), **way)
    assert found > 1e-4
    assert len(said) == 1
    assert "set `microbatch_size` instead of `accumulation_steps`" in said[0]


class OfAFunction(OwnStep):
    """Calls its network in a `tf.function`, which reads the weights."""

    def __init__(self, loss):
        super().__init__(loss)
        self.called = tf.function(lambda x: self.net(x, training=True))

    def loss_of(self, x, y, mask):
        return self.of_outputs(self.called(x), y, mask)


@pytest.mark.parametrize("settings", [{}, {"microbatch_size": 5}], ids=str)
@pytest.mark.parametrize("make", [OwnStep, OfAFunction])
def test_what_weights_enter_in_a_loop_or_a_function_divides_no_mean(make, settings, float64):
    found, said = difference(lambda: make(TOLD["weights of the outputs"]), settings=settings)
    assert found > 1e-4
    assert any("set `microbatch_size` instead of `accumulation_steps`" in text for text in said)


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [{}, {"microbatch_size": 5}], ids=str)
def test_a_mean_over_what_a_function_computes_matches_without_a_word_but_of_memory(
    settings, float64
):
    found, said = difference(lambda: OfAFunction(EXACT["masked, epsilon"]), settings=settings)
    assert found < TOLERANCE[float64]
    of_memory = ["No call of a layer goes by microbatches in"] if settings else []
    assert [text[:42] for text in said] == of_memory


def test_the_message_names_the_operation_and_the_line(float64):
    _, _, (said,) = fit(lambda: OwnStep(TOLD["root"]), 3)
    assert f"'Sqrt' in {__file__}:" in said


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["two masked", "nested", "all, over those of a mask"])
def test_losses_of_one_divisor_match_however_it_is_written(name, float64):
    found, said = difference(lambda: OwnStep(EXACT[name]))
    assert found <= TOLERANCE["float64"]
    assert said == []


def test_a_divisor_in_a_nested_function_is_told_of_as_such(float64):
    _, _, (said,) = fit(lambda: OwnStep(TOLD["nested mask"]), 3)
    assert "divides by something inside of a nested function" in said


def test_a_rule_of_the_users_has_the_last_word(float64):
    class Ruled(OwnStep):
        def microbatch_weight(self, x, y=None, sample_weight=None):
            return tf.shape(x)[0]

    assert fit(lambda: Ruled(TOLD["root"]), 3)[2] == []


def test_eagerly_it_is_told_that_nothing_is_read(float64):
    _, _, (said,) = fit(lambda: OwnStep(EXACT["mean"]), 3, run_eagerly=True)
    assert "it runs eagerly" in said


def test_tapes_are_left_as_they_were(float64):
    before = tf.GradientTape.gradient
    fit(lambda: OwnStep(EXACT["mean"]), 3)
    assert tf.GradientTape.gradient is before


# Compiled losses.


def rms(y, z):
    return tf.sqrt(tf.reduce_mean(tf.square(z - y)))


COMPILED_EXACT = {
    "one number": lambda y, z: tf.reduce_mean(tf.square(z - y)),
    "one number, a sum": lambda y, z: 0.01 * total(tf.square(z - y)),
    "one number, masked": lambda y, z: (
        total(tf.where(y > 0, tf.square(z - y), 0.0)) / total(tf.cast(y > 0, z.dtype))
    ),
    "values": lambda y, z: errors(z, y),
    "values of each entry": lambda y, z: tf.square(z - y),
    "huber": "huber",
}
COMPILED_TOLD = {
    "Dice": losses.Dice(),
    "Tversky": losses.Tversky(),
    "root": rms,
    "rows against rows": lambda y, z: tf.nn.softmax_cross_entropy_with_logits(
        tf.eye(tf.shape(z)[0], dtype=z.dtype), cosines(z, y)
    ),
    "minus the mean": lambda y, z: tf.square(z - y - tf.reduce_mean(z - y, 0)),
}


def sigmoids():
    hidden = layers.Dense(6, activation="tanh")
    return keras.Sequential([keras.Input((4,)), hidden, layers.Dense(2, "sigmoid")])


def compiled_difference(loss, **compile_args):
    x, y, _ = data()
    trained, said = [], []
    for steps in (3, 1):
        model = seeded(sigmoids)
        start = model.get_weights()
        if steps > 1:
            model = accumulate(model, accumulation_steps=steps)
        model.compile(keras.optimizers.Adam(0.01), loss, **compile_args)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            rows = 24 // steps
            model.fit(x, np.abs(y), batch_size=rows, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
        said += [str(warning.message) for warning in caught]
    return relative_difference(*trained, start), said


@pytest.mark.parametrize("way", [{}, {"jit_compile": True}])
@pytest.mark.parametrize("name", COMPILED_EXACT)
def test_compiled_losses_match_without_a_word(name, way, float64):
    found, said = compiled_difference(COMPILED_EXACT[name], **way)
    assert not said
    assert found < TOLERANCE[float64]


@pytest.mark.parametrize("way", [{}, {"jit_compile": True}])
@pytest.mark.parametrize("name", COMPILED_TOLD)
def test_compiled_losses_that_compare_samples_are_told_of(name, way, float64):
    found, said = compiled_difference(COMPILED_TOLD[name], **way)
    assert found > 1e-5
    assert len(said) == 1
    assert re.search(MIXES, said[0])


def test_lengths_that_change_beside_another_term_are_told_of(float64):
    """Of outputs, which the loss averages over, and of samples."""
    regularized = layers.Dense(1, activity_regularizer="l2")
    model = accumulate(keras.Sequential([keras.Input((None, 4)), regularized]))
    model.compile("sgd", "mse", accumulation_steps=2)
    batches = [(np.ones((4, n, 4)), np.ones((4, n, 1))) for n in (3, 5)]
    signature = tuple(tf.TensorSpec((None, None, n), tf.float64) for n in (4, 1))
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    with pytest.warns(UserWarning, match="average over different things"):
        model.fit(dataset, steps_per_epoch=2, shuffle=False, verbose=0)


class Adds(layers.Layer):
    def __init__(self, loss):
        super().__init__()
        self.of_outputs = loss

    def call(self, x):
        self.add_loss(self.of_outputs(x))
        return x


@pytest.mark.parametrize("loss", [tf.reduce_mean, total, tf.math.reduce_std])
def test_losses_that_layers_add_match_or_are_told_of(loss, float64):
    """A sum matches beside another, in full windows of equal batches."""
    weights = []
    for steps in (3, 1):
        model = seeded(lambda: keras.Sequential([*sigmoids().layers, Adds(loss)]))
        start = model.get_weights()
        model = accumulate(model, accumulation_steps=steps)
        summed = "sum" if loss is total else "sum_over_batch_size"
        model.compile(keras.optimizers.Adam(0.01), losses.MeanSquaredError(reduction=summed))
        x, y, _ = data()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            model.fit(x, y, batch_size=24 // steps, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
        assert len(caught) == (steps > 1 and loss is tf.math.reduce_std)
    found = relative_difference(*weights, start)
    assert found > 1e-4 if loss is tf.math.reduce_std else found < TOLERANCE[float64]


class TwoOptimizers(OwnStep):
    """Looks at its weights between two updates."""

    def __init__(self, uses):
        super().__init__(EXACT["mean"])
        self.last = keras.Sequential([keras.Input((2,)), layers.Dense(2)])
        self.uses = uses
        self.second = keras.optimizers.SGD(0.01)

    def train_step(self, data):
        x, y, _ = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(errors(self.last(self.net(x, training=True)), y))
        ours, others = self.net.trainable_variables, self.last.trainable_variables
        self.optimizer.apply(tape.gradient(loss, ours), ours)
        norm = tf.linalg.global_norm([tf.convert_to_tensor(w) for w in ours])
        gradients = tape.gradient(loss, others)
        if self.uses:
            gradients = [g * norm for g in gradients]
        self.second.apply(gradients, others)
        return {"loss": loss}


@pytest.mark.parametrize("uses", [False, True])
def test_of_what_is_read_between_two_updates_only_what_the_second_uses_is_told_of(uses, float64):
    trained = []
    for steps in (3, 1):
        model = seeded(lambda: TwoOptimizers(uses))
        start = model.get_weights()
        model = accumulate(model, accumulation_steps=steps)
        model.compile(keras.optimizers.SGD(0.01))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            batches = tf.data.Dataset.from_tensor_slices(data()).batch(24 // steps)
            model.fit(batches, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
        said = [str(warning.message) for warning in caught]
        assert ["before it applies" in text for text in said] == [True] * (uses and steps > 1)
    found = relative_difference(*trained, start)
    assert found > 1e-4 if uses else found < TOLERANCE[float64]


class SemiSupervised(OwnStep):
    """Averages over samples with targets, and over others."""

    def __init__(self, of_labelled=1.0, is_product=False):
        super().__init__(None)
        self.of_labelled = of_labelled
        self.is_product = is_product

    def loss_of(self, labelled, others):
        x, y = labelled
        loss = tf.reduce_mean(tf.square(self.net(others, training=True)))
        if self.is_product:
            return loss * tf.cast(tf.shape(x)[0], loss.dtype)
        if self.of_labelled:
            loss += self.of_labelled * tf.reduce_mean(errors(self.net(x, training=True), y))
        return loss


@pytest.mark.parametrize(
    ("others", "of_labelled", "is_product"),
    [
        ((6, 6, 6), 1.0, False),
        ((6, 3, 6), 1.0, False),
        ((6, 3, 6), 0.0, False),
        ((6, 6, 6), 0.0, True),
        ((6, 3, 6), 0.0, True),
    ],
)
def test_parts_of_batches_are_exact_in_one_ratio_and_told_of_otherwise(
    others, of_labelled, is_product, float64
):
    x, y, _ = data()
    ends = np.cumsum(others)
    parts = [
        ((x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]), x[20 + end - n : 20 + end])
        for i, (n, end) in enumerate(zip(others, ends, strict=True))
    ]
    full = ((x[:12], y[:12]), x[20 : 20 + sum(others)])
    vectors, targets = (tf.TensorSpec((None, n), tf.float64) for n in (4, 2))
    trained = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for batches in ([full], parts):
            model = seeded(lambda: SemiSupervised(of_labelled, is_product))
            start = model.get_weights()
            if batches is parts:
                model = accumulate(model, accumulation_steps=3)
            model.compile(keras.optimizers.Adam(0.01))
            model.optimizer.build(model.trainable_variables)
            dataset = tf.data.Dataset.from_generator(
                lambda b=batches: iter(b), output_signature=((vectors, targets), vectors)
            )
            model.fit(dataset.repeat(2), steps_per_epoch=2 * len(batches), shuffle=False, verbose=0)
            trained.append(model.get_weights())
    found = relative_difference(trained[1], trained[0], start)
    if len(set(others)) == 1 or not (of_labelled or is_product):
        assert not caught
        assert found < TOLERANCE[float64]
    else:
        assert found > 1e-3
        assert ["ratio of their sizes must stay" in str(warning.message) for warning in caught] == [
            True
        ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_ratio_counts_within_a_window_and_on_all_replicas(replicas, float64):
    x, y, _ = data()
    batches = [((x[:4], y[:4]), x[:others]) for others in (4, 4, 8, 8)]
    if replicas == 2:  # of which 8 and 7 samples are shared out as 4 and 4, and as 4 and 3
        batches = [((x[:8], y[:8]), x[:7])] * 4
    vectors, targets = (tf.TensorSpec((None, n), tf.float64) for n in (4, 2))
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=((vectors, targets), vectors)
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    with contextlib.nullcontext() if replicas == 1 else mirrored(2).scope():
        model = accumulate(seeded(SemiSupervised), accumulation_steps=2)
        model.compile(keras.optimizers.SGD(0.01))
        model.built = True  # Keras would call it, which only its step can
        model.optimizer.build(model.trainable_variables)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(dataset.with_options(options), steps_per_epoch=4, shuffle=False, verbose=0)
    said = [str(warning.message) for warning in caught]
    assert ["ratio of their sizes must stay" in text for text in said] == [True] * (replicas - 1)


class SeveralMeans(OwnStep):
    """Counts its samples by itself, and not."""

    def __init__(self):
        super().__init__(None)

    def loss_of(self, x, y, mask):
        values = errors(self.net(x, training=True), y)
        count = tf.cast(tf.shape(x)[0], values.dtype)
        return total(values) / count + total(values**2) / count + tf.reduce_mean(values)


def test_a_step_that_is_traced_again_matches(float64):
    """With a static number of samples, and then without."""
    trained = []
    for steps in (3, 1):
        model = seeded(SeveralMeans)
        start = model.get_weights()
        model = accumulate(model, accumulation_steps=steps)
        model.compile(keras.optimizers.SGD(0.01))
        ends = [0, 8, 16, 22] if steps == 3 else [0, 22]
        for begin, end in itertools.pairwise(ends):
            model.train_on_batch(*(a[begin:end] for a in data()))
        model.close_window()
        trained.append(model.get_weights())
    assert relative_difference(*trained, start) < TOLERANCE[float64]


# Of the steps of the field, what a window of several batches says: nothing where it is exact.
MIXES = "combines several samples|is not linear"
SAID = {
    "SimCLR": MIXES,
    "Barlow twins": MIXES,
    "NNCLR": MIXES,
    "dual encoder": MIXES,
    "CycleGAN": MIXES,
    "root of a mean": MIXES,
    "adversarial": MIXES,
    "BYOL": r"writes to \[.*on_update",
    "GAN": "before it applies",
    "VAE that adds a mean": "divided by nothing .a sum., and by the number of samples",
    "adaptive weights": "let the optimizer do it",
    "distillation": MIXES,
    **dict.fromkeys(["mean", "masked mean", "sum over samples", "vector", "masked language model"]),
}


@pytest.mark.parametrize("name", SAID)
def test_steps_of_the_field_are_exact_or_told_of(name, float64):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        window = train(STEPS[name], accumulation_steps=3, batch=8)
    said = [str(warning.message) for warning in caught]
    if SAID[name] is not None:
        assert any(re.search(SAID[name], text) for text in said), said
    else:
        assert not said
        whole = train(STEPS[name], batch=24)
        assert difference_of_trainings(window, whole) < TOLERANCE[float64]


@pytest.mark.parametrize("name", ["Wasserstein GAN", "optimizer of the script"])
def test_steps_that_cannot_be_accumulated_are_refused(name, float64):
    with pytest.raises(
        RuntimeError, match=r"applies the same optimizer twice|by a global variable"
    ):
        train(STEPS[name], accumulation_steps=3, batch=8)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("settings", [{"accumulation_steps": 3}, {"microbatch_size": 5}])
def test_one_number_beside_sample_weights_is_exact_or_told_of(settings, reduction, float64):
    class OneNumber(losses.Loss):
        def call(self, y_true, y_pred):
            return tf.reduce_mean(tf.square(y_true - y_pred))

    x, y, _ = data()
    weights = np.random.default_rng(1).uniform(size=44)
    steps = settings.get("accumulation_steps", 1)
    trained = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for given, batch in (({}, 24), (settings, 24 // steps)):
            model = seeded(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]))
            start = model.get_weights()
            model = accumulate(model, **given) if given else model
            model.compile(keras.optimizers.SGD(0.01), OneNumber(reduction=reduction))
            model.fit(x, y, batch, sample_weight=weights, epochs=2, shuffle=False, verbose=0)
            trained.append(model.get_weights())
    found = relative_difference(trained[1], trained[0], start)
    if steps > 1 and reduction != "mean_with_sample_weight":
        assert found > 1e-3
        assert ["returns a single number" in str(warning.message) for warning in caught] == [True]
    else:
        assert not caught
        assert found < TOLERANCE[float64]


class AddsOf(layers.Layer):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.1 * self.reduce(ops.square(x)))
        return x


class ComputesLossOfKeras(OwnLoss):
    """Adds the losses of its layers as `compute_loss` does."""

    reduce, reduction, scales = ops.sum, "sum_over_batch_size", False

    def make(self):
        reduce = type(self).reduce
        self.net = keras.Sequential([keras.Input((6,)), layers.Dense(5), AddsOf(reduce)])

    def compile(self, optimizer, **kwargs):
        super().compile(optimizer, loss=losses.MeanSquaredError(self.reduction), **kwargs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.net(x, training=True))
            scaled = self.optimizer.scale_loss(loss) if self.scales else loss
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return self.tracked(loss)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("attributes", "said", "is_exact"),
    [
        ({}, "scale_loss", False),
        ({"scales": True}, "Exact only if all microbatches weigh the same", True),
        ({"reduction": "sum"}, None, True),
        ({"reduce": ops.mean}, None, True),
        ({"reduce": lambda values: ops.sqrt(ops.mean(values))}, MIXES, False),
    ],
    ids=["sum beside a mean", "scaled", "sums", "means", "root"],
)
def test_losses_of_layers_in_the_loss_of_keras_are_exact_or_told_of(
    attributes, said, is_exact, float64
):
    model = type("Model", (ComputesLossOfKeras,), attributes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        window = train(model, accumulation_steps=2, rows=48, batch=12)
    texts = [str(warning.message) for warning in caught]
    assert any(re.search(said, text) for text in texts) if said else not texts, texts
    if is_exact:
        assert difference_of_trainings(window, train(model, rows=48)) < TOLERANCE[float64]
