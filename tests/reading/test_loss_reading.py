"""What is read from the graph of a loss: whether it adds up over samples."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, relative_difference
from keras import ops

from ga_model import accumulate
from ga_model.reading._loss_reading import (
    DoesNotAddUpError,
    adds_up,
    check_adds_up,
    kind_of_scalar,
    why_mixed,
)

TABLE = tf.constant([1.0, 2.0, 3.0, 4.0])

pytestmark = pytest.mark.every_case


def weighted(y, p):
    """By the class of a sample, of a table."""
    weights = tf.gather(TABLE, tf.cast(tf.abs(y[:, 0]), tf.int32))
    return weights * tf.reduce_mean(tf.square(y - p), -1)


def focal(y, p):
    p = tf.clip_by_value(tf.sigmoid(p), 1e-6, 1.0 - 1e-6)
    right = tf.where(y > 0.5, p, 1.0 - p)
    return -tf.reduce_mean((1.0 - right) ** 2 * tf.math.log(right), axis=-1)


def quantile(y, p):
    error = y - p
    return ops.mean(ops.maximum(0.9 * error, -0.1 * error), axis=-1)


def of_keras_inside(y, p):
    return 0.3 * keras.losses.mean_squared_error(y, p) + keras.losses.huber(y, p)


def cosine(y, p):
    return 1.0 - tf.reduce_sum(tf.math.l2_normalize(y, -1) * tf.math.l2_normalize(p, -1), -1)


def per_sample_dice(y, p):
    both = ops.sum(y * p, axis=1)
    return 1.0 - (2.0 * both + 1.0) / (ops.sum(y, axis=1) + ops.sum(p, axis=1) + 1.0)


def flattened(y, p):
    rows = ops.shape(y)[0]
    return ops.mean(ops.square(ops.reshape(y, (rows, -1)) - ops.reshape(p, (-1, 4))), axis=1)


def of_labels(y, p):
    labels = tf.cast(tf.abs(y[:, 0]), tf.int32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, p)


def smoothed(y, p):
    y = 0.9 * tf.one_hot(tf.cast(y[:, 0], tf.int32), 4) + 0.1 / 4
    return -tf.reduce_sum(y * tf.nn.log_softmax(p), -1)


def mean_of_all(y, p):
    return tf.reduce_mean(tf.square(y - p))


def half_of_the_mean(y, p):
    return 0.5 * ops.mean(ops.mean(ops.abs(y - p), axis=-1)) + 1.0


def in_channels(y, p):
    first, second = tf.split(p, 2, -1)
    return tf.reduce_mean(tf.concat([first, tf.exp(second)], 1) * tf.stack([y, y], 2)[..., 0], [1])


ADD_UP = [weighted, focal, quantile, of_keras_inside, cosine, per_sample_dice, flattened]
ADD_UP += [of_labels, smoothed, mean_of_all, half_of_the_mean, in_channels]


def dice(y, p):
    return 1.0 - 2.0 * tf.reduce_sum(y * p) / (tf.reduce_sum(y) + tf.reduce_sum(p))


def sum_of_all(y, p):
    return tf.reduce_sum(tf.square(y - p))


def root(y, p):
    return tf.sqrt(tf.reduce_mean(tf.square(y - p)))


def rows_against_rows(y, p):
    scores = p @ tf.transpose(p)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(p)[0]), scores)


def pairs_of_rows(y, p):
    return tf.reduce_mean(tf.square(p[:, None] - p[None]), [1, 2])


def centered(y, p):
    return tf.reduce_mean(tf.square(y - (p - tf.reduce_mean(p, 0))), -1)


def over_the_batch_size(y, p):
    return tf.reduce_sum(tf.square(y - p), -1) / tf.cast(tf.shape(y)[0], p.dtype)


def broadcast(y, p):
    """Of shape (rows, rows): the targets lie along the other axis."""
    return tf.reduce_mean(tf.square(y[:, 0] - p[:, :1]), -1)


def neighbours(y, p):
    return tf.reduce_mean(tf.square(p - tf.roll(p, 1, 0)), -1)


def first_row(y, p):
    return tf.reduce_mean(tf.square(p - p[:1]), -1)


def sorted_rows(y, p):
    return tf.reduce_mean(tf.square(y - tf.sort(p, 0)), -1)


def softmax_over_rows(y, p):
    return tf.reduce_mean(tf.nn.softmax(p, 0) * y, -1)


def masked_mean(y, p):
    mask = tf.cast(y > 0, p.dtype)
    return tf.reduce_sum(mask * tf.square(y - p)) / tf.reduce_sum(mask)


def correlation(y, p):
    return tf.reduce_sum(tf.square(tf.matmul(p, p, transpose_a=True) - tf.eye(4)))


def noisy(y, p):
    return tf.reduce_mean(tf.square(y - p + tf.random.normal(tf.shape(p))), -1)


def by_place(y, p):
    place = tf.cast(tf.range(tf.shape(p)[0]), p.dtype)
    return place * tf.reduce_mean(tf.square(y - p), -1)


def second_moment(y, p):
    return tf.square(tf.reduce_mean(y - p))


def cut(y, p):
    return tf.reduce_mean(tf.square(y - p), -1)[1:]


DO_NOT = [dice, sum_of_all, root, rows_against_rows, pairs_of_rows, centered, broadcast]
DO_NOT += [over_the_batch_size, neighbours, first_row, sorted_rows, softmax_over_rows]
DO_NOT += [masked_mean, correlation, noisy, by_place, second_moment, cut]


@pytest.mark.parametrize("loss", ADD_UP + DO_NOT)
def test_what_adds_up_is_told_from_what_does_not(loss):
    y, p = tf.ones((8, 4)), tf.ones((8, 4))
    assert adds_up(loss, y, p) == (loss in ADD_UP)


def keras_losses():
    """Return all losses of Keras with their default arguments."""
    classes = [c for _, c in inspect.getmembers(keras.losses, inspect.isclass)]
    return {c.__name__: c for c in classes if c is not keras.losses.Loss}


@pytest.mark.parametrize("name", sorted(keras_losses()))
def test_keras_losses_are_told_apart_as_their_values_are(name):
    """The loss values of all samples are those of each half, for a loss that adds up."""
    loss = keras_losses()[name]()
    keras.utils.set_random_seed(3)
    p = tf.nn.softmax(keras.random.normal((8, 4)))
    y = tf.one_hot([0, 1, 2, 3, 1, 2, 0, 3], 4)
    if name == "CategoricalGeneralizedCrossEntropy":
        y = tf.constant([0, 1, 2, 3, 1, 2, 0, 3])
    if name == "Circle" or "Sparse" in name:
        y = tf.constant([[0], [1], [2], [3], [1], [2], [0], [3]])
    if name == "CTC":
        y, p = tf.ones((8, 2), tf.int32), tf.stack([p] * 5, 1)
    values = loss.call(y, p)
    halves = [loss.call(y[:4], p[:4]), loss.call(y[4:], p[4:])]
    is_by_sample = values.shape.rank > 0 and bool(
        tf.reduce_all(tf.abs(tf.concat(halves, 0) - values) < 1e-5)
    )
    try:
        check_adds_up(loss, y, p)
        is_read = True
    except DoesNotAddUpError:
        is_read = False
    assert is_read == is_by_sample


def test_what_is_known_of_keras_losses_can_be_read_too():
    """Not by name only: most of their graphs prove it."""
    p = tf.nn.softmax(tf.ones((8, 4)))
    losses = keras_losses()
    read = [
        name
        for name, make in losses.items()
        if "Sparse" not in name and adds_up(make().call, tf.ones((8, 4)), p)
    ]
    assert len(read) >= 14
    assert not set(read) & {"Dice", "Tversky", "Circle"}


SCALARS = {
    "mean": [
        lambda x, w: tf.reduce_mean(tf.square(x)),
        lambda x, w: -0.5 * ops.mean(ops.sum(1.0 + x - ops.square(x) - ops.exp(x), axis=1)),
        lambda x, w: 0.1 * tf.reduce_mean(tf.nn.relu(x @ w)) + tf.reduce_mean(x),
        lambda x, w: tf.reduce_sum(tf.square(x)) / tf.cast(tf.shape(x)[0], x.dtype),
        lambda x, w: tf.reduce_sum(tf.square(w)),  # of no samples
        lambda x, w: ops.sum(ops.mean(ops.square(x), axis=0)),
    ],
    "sum": [
        lambda x, w: tf.reduce_sum(tf.square(x)),
        lambda x, w: -0.5 * ops.sum(1.0 + x - ops.square(x) - ops.exp(x)),
        lambda x, w: ops.sum(ops.mean(ops.square(x @ w), axis=1)),
    ],
    None: [
        lambda x, w: tf.sqrt(tf.reduce_mean(tf.square(x))),
        lambda x, w: tf.reduce_mean(x) * tf.reduce_mean(x),
        lambda x, w: tf.reduce_sum(x) + tf.reduce_mean(x),
        lambda x, w: tf.reduce_mean(tf.square(x - tf.reduce_mean(x, 0))),
        lambda x, w: tf.reduce_max(x),
        lambda x, w: tf.reduce_sum(x) + tf.reduce_sum(w),
        lambda x, w: tf.reduce_sum(tf.matmul(x, x, transpose_a=True)),
    ],
}


@pytest.mark.parametrize(
    ("kind", "scalar"), [(kind, scalar) for kind, scalars in SCALARS.items() for scalar in scalars]
)
def test_added_losses_are_told_apart(kind, scalar):
    weight, found = tf.Variable(tf.ones((4, 4))), []

    @tf.function(input_signature=[tf.TensorSpec([None, 4])], autograph=False)
    def of_microbatch(x):
        found.append(kind_of_scalar(scalar(x, weight)))

    of_microbatch.get_concrete_function()
    assert found == [kind]


class Normal(keras.layers.Layer):
    def call(self, x):
        return (x - ops.mean(x, axis=0)) / ops.std(x, axis=0)


class Attends(keras.layers.Layer):
    """Every sample looks at all."""

    def build(self, shape):
        self.dense = keras.layers.Dense(4)
        self.dense.build(shape)

    def call(self, x):
        return ops.matmul(ops.softmax(ops.matmul(self.dense(x), ops.transpose(x))), x)


class Farthest(keras.layers.Layer):
    def call(self, x):
        return x - ops.max(x, axis=0, keepdims=True)


def mixing(layer):
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4), layer, keras.layers.Dense(2)]
    )


def recurrent():
    ids = keras.Input((None,), dtype="int32")
    h = keras.layers.Embedding(9, 8, mask_zero=True)(ids)
    h = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True))(h)
    h = keras.layers.GRU(4, dropout=0.1, return_sequences=True)(h)
    h = keras.layers.MultiHeadAttention(2, 2)(h, h, use_causal_mask=True)
    h = keras.layers.LayerNormalization()(keras.layers.Dropout(0.1)(h))
    return keras.Model(ids, keras.layers.GlobalAveragePooling1D()(h))


def images():
    return keras.Sequential(
        [
            keras.Input((None, None, 3)),
            keras.layers.RandomFlip(),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.GroupNormalization(2),
            keras.layers.SpatialDropout2D(0.2),
            keras.layers.Conv2DTranspose(4, 3, strides=2),
            keras.layers.UnitNormalization(),
            keras.layers.GlobalMaxPooling2D(),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Reshape((2, 2)),
            keras.layers.Permute((2, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(2, "softmax"),
        ]
    )


def of_batch(function):
    return lambda: mixing(keras.layers.Lambda(function))


def attends_to_samples():
    """Attention over the batch (2203.01522)."""
    inputs = keras.Input((4,))
    h = ops.expand_dims(keras.layers.Dense(4)(inputs), 0)
    h = keras.layers.MultiHeadAttention(2, 2)(h, h)
    return keras.Model(inputs, ops.squeeze(h, 0))


def frozen_normalization_and_a_mean():
    return keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), Normal()])


def deviation(x):
    groups = tf.reshape(x, (4, -1, 4))
    return x + tf.tile(tf.math.reduce_std(groups, 0), (4, 1))


def mapped_by_place(x):
    counted = tf.while_loop(
        lambda i, _: i < tf.shape(x)[0],
        lambda i, y: (i + 1, y.write(i, x[i] * tf.cast(i, x.dtype))),
        (0, tf.TensorArray(x.dtype, tf.shape(x)[0], element_shape=x.shape[1:])),
    )
    return counted[1].stack()


def entries_by_place(x):
    places = tf.stack([tf.range(tf.shape(x)[0]), tf.argmax(x, 1, output_type="int32")], 1)
    return tf.tensor_scatter_nd_update(x, places, 2.0 * tf.gather_nd(x, places))


def number(x):
    return tf.shape(x)[0]


# Numbers that samples have by their place, or that follow from how many there are.
PLACES = [
    lambda x: tf.linspace(tf.constant(0.0), tf.constant(1.0), number(x))[:, None],
    lambda x: tf.eye(number(x))[:, :1],
    lambda x: tf.one_hot(tf.range(number(x)), 3)[:, :1],
    lambda x: tf.gather(tf.range(100.0), tf.range(number(x)))[:, None],
    lambda x: tf.cast(tf.concat([[0], tf.range(1, number(x))], 0), x.dtype)[:, None],
    lambda x: tf.tile(tf.cast(tf.range(number(x)), x.dtype)[:, None], [1, 4]),
    lambda x: tf.cast(tf.stack([tf.range(number(x))] * 2, 1), x.dtype)[:, :1],
    lambda x: tf.cumsum(tf.ones(tf.concat([tf.shape(x)[:1], [1]], 0))),
    lambda x: 1.0 / (tf.cast(number(x), x.dtype) + 1.0),
    lambda x: 1.0 / tf.cast(tf.maximum(number(x), 1), x.dtype),
]
NO_PLACES = [
    lambda x: tf.linspace(tf.constant(0.0), tf.constant(1.0), tf.shape(x)[1]),
    lambda x: tf.one_hot(tf.argmax(x, 1), 4),
    lambda x: tf.ones(tf.concat([tf.shape(x)[:-1], [1]], 0)),
    lambda x: tf.broadcast_to([[2.0]], tf.concat([tf.shape(x)[:-1], [1]], 0)),
    lambda x: tf.tile([[2.0]], [number(x), 1]),
    lambda x: tf.reshape(2.0 * tf.reshape(x, [number(x) * 2, -1]), [number(x), -1]),
    lambda x: tf.gather_nd(x, tf.stack([tf.range(number(x)), 0 * tf.range(number(x))], 1))[:, None],
]


def times(function):
    return lambda x: x * function(x)


def transposed(function):
    return lambda x: tf.transpose(function(tf.transpose(x)))


def halved(x, times):
    return tf.while_loop(lambda i, y: i < times, lambda i, y: (i + 1, 0.5 * y), (0, x))[1]


def lagged_mean(x):
    """A mean over samples, which the next iteration of a loop uses."""

    def body(i, y, mean):
        return i + 1, y + mean, tf.reduce_mean(y, 0, keepdims=True)

    return tf.while_loop(lambda i, *_: i < 3, body, (0, x, tf.zeros_like(x[:1])))[1]


def until_all_are_near(x):
    def body(y, far):
        return 0.5 * y, tf.reduce_max(tf.abs(y))

    return tf.while_loop(lambda y, far: far > 1.0, body, (x, tf.constant(2.0, x.dtype)))[0]


# On an axis that is not the first, samples are chosen, moved or put together.
MIXING_INSIDE = [
    lambda x: tf.reshape(tf.transpose(x), tf.shape(x)),
    lambda x: x + tf.transpose(x)[:, :1][:, 0],
    lambda x: x + tf.gather(tf.transpose(x), [0], axis=1)[:, 0],
    lambda x: x + tf.linalg.band_part(tf.transpose(x), 1, 0)[:, :1][:, 0],
    lambda x: x + tf.raw_ops.NthElement(input=tf.transpose(x), n=0)[None],
    lambda x: x + tf.nn.depth_to_space(tf.transpose(x)[None, None], 2)[0, :, :1, 0],
    transposed(lambda x: tf.roll(x, 1, 1)),
    transposed(lambda x: tf.pad(x, [[0, 0], [1, 0]])[:, :-1]),
    transposed(lambda x: tf.pad(x[:, 1:], [[0, 0], [0, 1]])),
    transposed(lambda x: tf.concat([x[:, 1:], x[:, :1]], 1)),
    transposed(lambda x: tf.tile(x, [1, 2])[:, 1 : tf.shape(x)[1] + 1]),
    transposed(lambda x: tf.slice(x, [0, 0], [4, 1]) + x),
    transposed(lambda x: tf.nn.conv1d(x[:, :, None], tf.ones((3, 1, 1)), 1, "SAME")[:, :, 0]),
    transposed(lambda x: tf.nn.lrn(x[:, None, None])[:, 0, 0]),
]
KEEPING_INSIDE = [
    transposed(lambda x: tf.roll(x, 1, 0)),
    transposed(lambda x: tf.pad(x[1:], [[0, 1], [0, 0]])),
    transposed(lambda x: tf.concat([x[1:], x[:1]], 0)),
    transposed(lambda x: x[..., tf.newaxis, :][:, 0]),
    transposed(lambda x: tf.reshape(tf.reshape(x, [4, -1, 1]), [4, -1])),
]
MIXING = [
    *MIXING_INSIDE,
    lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, [-1, 8])), tf.shape(x)),
    lambda x: x + tf.slice(x, [0, 0], [1, 4]),
    lambda x: tf.pad(x, [[1, 0], [0, 0]])[:-1],
    lambda x: x + tf.cast(tf.shape(tf.where(x > 0))[0], x.dtype),
    *map(times, PLACES),
    lambda x: ops.cumprod(x, axis=0),
    lambda x: x * ops.softmax(x[:, 0])[:, None],
    lambda x: x + tf.math.unsorted_segment_mean(x, tf.zeros_like(x[:, 0], "int32"), 1),
    lambda x: x - tf.einsum("bi->i", x),
    lambda x: tf.scan(lambda a, b: a + b, x),
    lambda x: x + tf.function(lambda v: tf.reduce_mean(v, 0))(x),
    lambda x: tf.nn.softmax(tf.reshape(x, (-1, 2, 2)), 0)[:, 0],
    lambda x: tf.compat.v1.nn.fused_batch_norm(x[:, None, None], tf.ones(4), tf.zeros(4))[0][
        :, 0, 0
    ],
    lambda x: ops.conv(x[None], tf.ones((3, 4, 4)), padding="same")[0],
    lambda x: x - tf.concat(tf.split(x, 2, 0)[::-1], 0),
    lambda x: x * ops.mean(x[:, :1] - x[:, 0]),
    lambda x: x + tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=x.dtype),
    lambda x: x * keras.random.uniform(ops.shape(x), seed=3),
    deviation,
    lambda x: tf.clip_by_global_norm([x], 0.1)[0][0],
    lambda x: tf.ensure_shape(tf.linalg.qr(x)[0], x.shape),
    lambda x: tf.transpose(tf.math.real(tf.signal.ifft(tf.cast(tf.transpose(x), tf.complex64)))),
    lambda x: x / tf.cast(tf.size(x), x.dtype),
    lambda x: x - tf.ones((1, tf.shape(x)[0])) @ x,
    lambda x: x * tf.exp(-0.1 * tf.cast(tf.range(tf.shape(x)[0]), x.dtype))[:, None],
    lambda x: tf.reverse_sequence(x, [3, 2, 2, 2], seq_axis=0, batch_axis=1),
    lambda x: tf.cond(tf.reduce_max(x) > 1.0, lambda: x, lambda: 0.5 * x),
    lambda x: tf.while_loop(lambda y: tf.reduce_max(y) > 1.0, lambda y: (0.5 * y,), (x,))[0],
    lambda x: tf.map_fn(lambda row: row - tf.reduce_mean(x, 0), x),
    lambda x: tf.vectorized_map(lambda row: row - tf.reduce_mean(x, 0), x),
    lambda x: tf.gather(x, tf.reverse(tf.range(tf.shape(x)[0]), [0])),
    lambda x: tf.gather_nd(x, tf.argmax(x, 1)[:, None] % 3),
    mapped_by_place,
]
SEEDS = keras.random.SeedGenerator(3)
KEEPING = [
    *KEEPING_INSIDE,
    lambda x: tf.tensordot(tf.reshape(x, [-1, 2, 2]), tf.ones((2, 3)), 1)[:, 0],
    lambda x: tf.reshape(2.0 * tf.reshape(x, [-1, 2]), [-1, 4]),
    lambda x: tf.slice(x, [0, 1], [-1, 2]),
    lambda x: ops.slice(x, [0, 1], [tf.shape(x)[0], 2]),
    lambda x: tf.pad(x, [[0, 0], [1, 0]]),
    *map(times, NO_PLACES),
    lambda x: ops.cumsum(x, axis=1),
    lambda x: ops.softmax(x, axis=1),
    lambda x: tf.nn.softmax(tf.reshape(x, (-1, 2, 2)), 1)[:, 0],
    lambda x: tf.function(lambda v: v - tf.reduce_mean(v, 1, keepdims=True))(x),
    lambda x: ops.sort(x, axis=-1),
    lambda x: x + keras.random.normal(ops.shape(x), seed=SEEDS),
    lambda x: x + keras.random.normal((4,), seed=3),
    lambda x: tf.einsum("bi,bj->bij", x, x)[:, 0],
    lambda x: tf.map_fn(lambda row: row * tf.reduce_sum(row), x),
    lambda x: tf.map_fn(lambda row: row[0] * row[1], (x, 2.0 * x), fn_output_signature=x.dtype),
    lambda x: tf.vectorized_map(lambda row: row * tf.reduce_sum(row), x),
    lambda x: x + keras.layers.CategoryEncoding(4, output_mode="count")(tf.cast(x > 0, "int32")),
    entries_by_place,
    lambda x: tf.linalg.inv(tf.linalg.diag(2.0 + tf.square(x)))[:, 0],
    lambda x: x + tf.math.real(tf.signal.fft(tf.cast(x, tf.complex64))),
    lambda x: tf.cond(tf.size(x) > 0, lambda: x, lambda: 0.5 * x),
]
MODELS = [(of_batch(function), True) for function in MIXING]
MODELS += [(of_batch(function), False) for function in KEEPING]
MODELS += [(attends_to_samples, True), (frozen_normalization_and_a_mean, True)]
MODELS += [(lambda: mixing(keras.layers.BatchNormalization()), False)]
MODELS += [(lambda: mixing(Normal()), True), (lambda: mixing(Attends()), True)]
MODELS += [(lambda: mixing(Farthest()), True)]
MODELS += [(lambda: mixing(keras.layers.Dropout(0.5)), False), (recurrent, False), (images, False)]


def mixes_samples(model):
    """Return whether a model is told of as one whose outputs depend on other samples."""
    found = []
    spec = tf.TensorSpec([None, *model.input_shape[1:]], model.inputs[0].dtype)

    @tf.function(input_signature=[spec], autograph=False)
    def of_microbatch(x):
        found.append(why_mixed([model(x, training=True)], model))

    of_microbatch.get_concrete_function()
    return found[0] is not None


@pytest.mark.parametrize(("make", "mixes"), MODELS)
def test_layers_that_compute_with_other_samples_are_told(make, mixes):
    assert mixes_samples(make()) == mixes


def test_what_an_iteration_gives_the_next_one_begins_with():
    assert mixes_samples(of_batch(lagged_mean)())
    assert mixes_samples(of_batch(until_all_are_near)())
    assert not mixes_samples(of_batch(lambda x: halved(x, times=3))())


def test_the_number_of_samples_chooses():
    assert mixes_samples(of_batch(lambda x: halved(x, times=tf.shape(x)[0]))())
    assert mixes_samples(of_batch(lambda x: tf.cond(tf.size(x) > 5, lambda: x, lambda: 0.5 * x))())


def crops(x):
    images = tf.reshape(x, [-1, 2, 2, 1])
    first = tf.image.crop_and_resize(images, [[0.0, 0.0, 1.0, 1.0]], [0], [2, 2])
    return x + tf.cast(tf.reshape(first, [1, 4]), x.dtype)


def kernel_gradient(x):
    images = tf.reshape(x, [-1, 2, 2, 1])
    gradient = tf.raw_ops.Conv2DBackpropFilter(
        input=images,
        filter_sizes=[2, 2, 1, 1],
        out_backprop=images[:, :1, :1],
        strides=[1, 1, 1, 1],
        padding="VALID",
    )
    return x + tf.reshape(gradient, [1, 4])


def suppresses(x):
    boxes = tf.cast(x, "float32")
    number = tf.size(tf.image.non_max_suppression(boxes, boxes[:, 0], 9))
    return x * tf.cast(number, x.dtype)


UNKNOWN = {
    "CropAndResize": crops,
    "DynamicStitch": lambda x: tf.dynamic_stitch([tf.range(tf.shape(x)[0])[::-1]], [x]),
    "Where": lambda x: x + tf.cast(tf.where(tf.ones(tf.shape(x)[:1]))[:, :1], x.dtype),
    "Conv2DBackpropFilter": kernel_gradient,
    "NonMaxSuppressionV3": suppresses,
}


@pytest.mark.parametrize("settings", [{}, {"run_eagerly": True}], ids=str)
@pytest.mark.parametrize("name", UNKNOWN)
def test_operations_that_may_mix_samples_get_the_full_batch(name, settings, float64):
    def fit(rows):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, "sigmoid")])
        model.add(keras.layers.Lambda(UNKNOWN[name]))
        model.add(keras.layers.Dense(4))
        start = [np.linspace(-1, 1, w.size).reshape(w.shape) for w in model.get_weights()]
        model.set_weights(start)
        model = model if rows is None else accumulate(model, microbatch_size=rows)
        model.compile(keras.optimizers.SGD(0.1), "mse", **settings)
        x = np.random.default_rng(0).uniform(size=(12, 4))
        model.fit(x, x, batch_size=12, epochs=2, verbose=0)
        return model.get_weights(), start

    with pytest.warns(UserWarning, match=f"an operation that may mix samples: '{name}'"):
        found, _ = fit(5)
    assert relative_difference(found, *fit(None)) <= TOLERANCE["float64"]


def test_a_rank_that_no_graph_knows_is_no_obstacle():
    class OfAnyRank(keras.layers.Layer):
        def call(self, inputs):
            values = tf.io.parse_tensor(tf.io.serialize_tensor(inputs), tf.float32)
            return inputs + tf.reshape(tf.reduce_mean(values, axis=-1), [-1, 1])

        def compute_output_shape(self, shape):
            return shape

    model = keras.Sequential([OfAnyRank(), keras.layers.Dense(1)])
    model = accumulate(model, microbatch_size=2, loss_over="batch")
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="may mix samples: 'SerializeTensor' in"):
        model.fit(np.ones((8, 4), "float32"), np.ones((8, 1)), batch_size=4, verbose=0)
    assert model.optimizer.iterations == 2
