"""Whatever step of the user's own is drawn: `microbatch_size` trains as the full batch does.

And `accumulation_steps` does, or tells that it does not.
"""

import dataclasses
import warnings
from typing import Any

import keras
import pytest
import tensorflow as tf
from helpers import TOLERANCE, MeanOfSquares, examples
from hypothesis import event, given
from hypothesis import strategies as st
from keras import layers
from own_steps import OwnStep, contrastive, mlp, normal, variables_of
from own_training import assert_same, difference, train

FEATURES, OUTPUTS = 6, 3

LAYERS = {
    "dense": lambda x: layers.Dense(5, "tanh")(x),
    "residual": lambda x: x + layers.Dense(x.shape[-1], "softplus")(x),
    "normalization": lambda x: layers.LayerNormalization()(x),
    "regularized": lambda x: layers.Dense(4, "tanh", kernel_regularizer="l2")(x),
    "activity": lambda x: layers.Dense(4, "tanh", activity_regularizer=MeanOfSquares(0.01))(x),
    "recurrent": lambda x: layers.GRU(4)(layers.Reshape((-1, 1))(x)),
}


def correlation(z):
    z = z - tf.reduce_mean(z, 0)
    return tf.transpose(z) @ z / tf.cast(tf.shape(z)[0], z.dtype)


# Of outputs, targets, and the outputs of another call. A tape sums what is no scalar.
TERMS = {
    "mean": lambda z, y, other: tf.reduce_mean(tf.abs(z - y)),
    "sum": lambda z, y, other: 0.1 * tf.reduce_sum(tf.square(z - other)),
    "values": lambda z, y, other: 0.1 * tf.reduce_sum(tf.tanh(z) * y, -1),
    "masked mean": lambda z, y, other: tf.math.divide_no_nan(
        tf.reduce_sum(tf.where(y > 0, tf.square(z), 0.0)),
        tf.reduce_sum(tf.cast(y > 0, z.dtype)),
    ),
    "weights of the outputs": lambda z, y, other: tf.reduce_sum(
        tf.nn.softmax(z, 0) * tf.square(other - y)
    ),
    "root": lambda z, y, other: tf.sqrt(tf.reduce_mean(tf.square(z - y - 1.0))),
    "variance": lambda z, y, other: tf.math.reduce_variance(z + other, 0),
    "rows against rows": lambda z, y, other: contrastive(z, other + y),
    "correlation": lambda z, y, other: tf.square(correlation(z) - correlation(other)),
    "largest": lambda z, y, other: tf.reduce_max(tf.square(z - y)),
    "neighbours": lambda z, y, other: tf.reduce_mean(tf.square(z - tf.roll(z, 1, 0))),
}

# Of the networks and the inputs: the outputs of another call.
OTHERS = {
    "the same": lambda net, x, z: z,
    "called again": lambda net, x, z: net.outputs(x[:, ::-1]),
    "in one call": lambda net, x, z: tf.split(net.outputs(tf.concat([x, -x], 0)), 2)[1],
    "of a slow copy": lambda net, x, z: net.slow(x),
    "of its outputs": lambda net, x, z: net.last(net.back(z)),
}

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.005, use_ema=True, ema_momentum=0.5),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """What is drawn."""

    rows: int
    batch: int
    size: int
    layers: list[str]
    terms: list[str]
    other: str
    optimizer: str
    updates: str
    repeats: int
    has_penalty: bool
    clips: bool
    moves: bool


class Drawn(OwnStep):
    """Has the step that was drawn.

    A mean that every weight has a gradient of is a part of each loss: the other terms do not see
    every shift.
    """

    def __init__(self, step):
        self._step = step
        super().__init__()

    def make(self):
        x = inputs = keras.Input((FEATURES,))
        for name in self._step.layers:
            x = LAYERS[name](x)
        if x is inputs:
            x = layers.Identity()(x)  # up to Keras 3.12 a model needs a layer
        self.first = keras.Model(inputs, x)
        self.last = layers.Dense(OUTPUTS)
        self.last.build((None, x.shape[-1]))
        self.back = mlp(OUTPUTS, x.shape[-1])
        self.back.trainable = False
        self.slow = mlp(FEATURES, OUTPUTS)
        self.slow.trainable = False

    def data(self, rows):
        return normal(rows, FEATURES), normal(rows, OUTPUTS, seed=4)

    def optimizer_class(self):
        return OPTIMIZERS[self._step.optimizer]()

    def trained(self):
        if self._step.updates == "of all":
            return [variables_of(self.first, self.last)]
        return [group for part in (self.first, self.last) if (group := variables_of(part))]

    def outputs(self, x):
        return self.last(self.first(x, training=True))

    def loss_of(self, x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            z = self.outputs(x)
            value = tf.reduce_sum(tf.tanh(z))
        other = OTHERS[self._step.other](self, x, z)
        loss = tf.reduce_mean(tf.square(z - y + 0.3))
        for name in self._step.terms:
            loss = tf.reduce_sum(TERMS[name](z, y, other)) * 0.3 + loss
        if self._step.has_penalty:
            loss += tf.reduce_mean(tf.norm(inner.gradient(value, x) + 0.1, axis=-1))
        return loss + sum(self.losses)

    def train_step(self, data):
        x, y = data
        groups = self.trained()
        for _ in range(self._step.repeats):
            tapes = 1 if self._step.updates != "in turn" else len(groups)
            for number in range(tapes):
                with tf.GradientTape(persistent=True) as tape:
                    loss = self.loss_of(x, y)
                of_tape = groups if tapes == 1 else [groups[number]]
                for variables in of_tape:
                    gradients = tape.gradient(loss, variables)
                    if self._step.clips:
                        gradients, _ = tf.clip_by_global_norm(gradients, 0.3)
                    place = next(i for i, g in enumerate(groups) if g is variables)
                    self.optimizers[place].apply(gradients, variables)
        if self._step.moves:
            slow, fast = self.slow.weights[-1], self.last.weights[-1]
            slow.assign(0.9 * slow + 0.1 * fast)
        return self.tracked(loss)


def drawn(values: Any):
    return st.sampled_from(list(values))


STEPS = st.builds(
    Step,
    rows=st.integers(1, 40),
    batch=st.integers(1, 16),
    size=st.integers(1, 9),
    layers=st.lists(drawn(LAYERS), max_size=3),
    terms=st.lists(drawn(TERMS), max_size=3),
    other=drawn(OTHERS),
    optimizer=drawn(OPTIMIZERS),
    updates=drawn(["of all", "of each", "in turn"]),
    repeats=st.integers(1, 2),
    has_penalty=st.booleans(),
    clips=st.booleans(),
    moves=st.booleans(),
)
# Of which some are exact in windows.
STEPS_OF_WINDOWS = st.builds(
    dataclasses.replace,
    STEPS,
    batch=st.integers(2, 6),
    terms=st.lists(drawn(["mean", "sum", "values", "masked mean", "root"]), max_size=1),
    repeats=st.just(1),
    has_penalty=st.just(False),
    clips=drawn([False, False, False, True]),
    moves=drawn([False, False, False, True]),
)


@pytest.mark.parametrize(
    ("way", "number", "is_deep"),
    [
        ({}, 2, False),
        ({"run_eagerly": True}, 3, False),
        pytest.param({}, 300, True, marks=pytest.mark.deep),
        pytest.param({"run_eagerly": True}, 500, True, marks=pytest.mark.deep),
        pytest.param({"jit_compile": True}, 30, True, marks=pytest.mark.deep),
    ],
)
def test_updates_are_the_big_batchs(way, number, is_deep, float64):
    @examples(number, is_deep)
    @given(STEPS)
    def agree(step):
        keras.utils.clear_session()
        settings = {"rows": step.rows, "batch": step.batch, **way}
        split, whole = (train(lambda: Drawn(step), size, **settings) for size in (step.size, None))
        assert_same(split, whole, TOLERANCE[float64])

    agree()


@pytest.mark.gate
@pytest.mark.parametrize(
    ("number", "is_deep"), [(5, False), pytest.param(300, True, marks=pytest.mark.deep)]
)
def test_windows_are_the_big_batchs_or_are_told_of(number, is_deep, float64):
    @examples(number, is_deep)
    @given(STEPS_OF_WINDOWS, st.integers(2, 3))
    def agree(step, steps):
        keras.utils.clear_session()
        rows = {"rows": step.rows, "epochs": 1}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            window = train(lambda: Drawn(step), accumulation_steps=steps, batch=step.batch, **rows)
        whole = train(lambda: Drawn(step), batch=step.batch * steps, **rows)
        event(f"told: {bool(caught)}")
        assert caught or difference(window, whole) <= TOLERANCE[float64]

    agree()
