"""Running averages of BatchNormalization are those of the full batch.

Where the inputs of a layer do not depend on what another one has normalized, they equal those of
plain Keras on the full batch.
"""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, dense_data, mirrored, relative_difference, seeded

from ga_model import AccumulatingModel, accumulate
from ga_model.sums._moments import Moments

pytestmark = [
    pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode"),
    pytest.mark.filterwarnings("ignore:Layer 'flatten:UserWarning"),  # ends what is masked
]

layers = keras.layers
WAYS = {"graph": {}, "eager": {"run_eagerly": True}, "xla": {"jit_compile": True}}
# Settings, and samples per batch where an update takes 12.
SETTINGS = {
    "both": ({"accumulation_steps": 3, "microbatch_size": 3}, 4),
    "split": ({"microbatch_size": 5}, 12),
    "windows": ({"accumulation_steps": 3}, 4),
    "recomputed": ({"microbatch_size": 5, "loss_over": "batch"}, 12),
    "recomputed windows": (
        {"accumulation_steps": 3, "microbatch_size": 3, "loss_over": "batch"},
        4,
    ),
}
every_setting = pytest.mark.parametrize("settings", SETTINGS)


def averages(model):
    """Return the running averages of all BatchNormalization layers."""
    normal = [m for m in model._flatten_layers() if isinstance(m, layers.BatchNormalization)]
    return [v.numpy() for layer in normal for v in layer.non_trainable_variables]


def fit(make, settings, data, rows, epochs=2, start=None, **arguments):
    model = accumulate(seeded(make), **settings)
    model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
    before = averages(model)
    model.fit(*data, batch_size=rows, epochs=epochs, shuffle=False, verbose=0)
    return model, before


def difference(make, settings, data, **arguments):
    """Return the relative difference of the change of running averages to plain Keras's."""
    settings, rows = SETTINGS[settings]
    model, start = fit(make, settings, data, rows, **arguments)
    reference, _ = fit(make, {}, data, 12, **arguments)
    return relative_difference(averages(model), averages(reference), start)


def first(**arguments):
    """A model that normalizes its inputs, and what frozen layers make of them."""
    frozen = layers.Dense(3, activation="tanh", trainable=False)
    inputs = keras.Input((4,))
    parts = [
        layers.BatchNormalization(**arguments)(inputs),
        layers.BatchNormalization(momentum=0.7, **arguments)(frozen(inputs)),
    ]
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(parts)))


def masked(features=3, axis=-1):
    inputs = keras.Input((5, features))
    normal = layers.BatchNormalization(momentum=0.8, axis=axis)(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(normal)))


@pytest.mark.parametrize("way", WAYS)
@every_setting
def test_they_are_those_of_the_full_batch(settings, way, float64):
    """The last window has a part of its batches, and the last batch a part of its samples."""
    arguments = {} if way == "graph" else WAYS[way]
    assert difference(first, settings, dense_data(41), **arguments) <= TOLERANCE["float64"]


def per_time_step():
    inputs = keras.Input((3, 4))
    normal = layers.TimeDistributed(layers.BatchNormalization(momentum=0.8))(inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(normal)))


@pytest.mark.parametrize("settings", ["split", "windows"])
def test_under_the_name_of_a_wrapper_they_are_the_same_and_no_other_warning_comes(
    settings, float64
):
    x, y = dense_data(24, 12)
    data = x.reshape(24, 3, 4), y
    assert difference(per_time_step, settings, data, epochs=1) <= TOLERANCE["float64"]


@pytest.mark.parametrize("settings", SETTINGS)
def test_in_float32_also_where_means_are_large(settings):
    x, y = dense_data(36)
    data = x + np.float32(1000), y * np.float32(1e-3)
    model, _ = fit(first, SETTINGS[settings][0], data, SETTINGS[settings][1])
    reference, _ = fit(first, {}, data, 12)
    for a, b in zip(averages(model), averages(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE["float32"])


def test_steps_per_execution(float64):
    arguments = {"steps_per_execution": 2}
    assert difference(first, "both", dense_data(41), **arguments) <= TOLERANCE["float64"]


class Subclass(layers.BatchNormalization):
    pass


class MovesItself(layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask)


def with_layer(layer):
    return lambda: keras.Sequential([keras.Input((4,)), layer(name="bn"), layers.Dense(2)])


def test_a_subclass_without_a_call_of_its_own(float64):
    assert difference(with_layer(Subclass), "both", dense_data(41)) <= TOLERANCE["float64"]


@pytest.mark.parametrize("settings", SETTINGS)
def test_moving_them_per_microbatch_differs_and_is_told(settings, float64):
    """The control: a layer that is not heard."""
    own, rows = SETTINGS[settings]
    model = accumulate(seeded(with_layer(MovesItself)), **own)
    model.compile("sgd", "mse")
    start = averages(model)
    with pytest.warns(UserWarning, match=r"\['bn'\].*once per microbatch") as caught:
        model.fit(*dense_data(36), batch_size=rows, shuffle=False, verbose=0)
    assert [w.category for w in caught].count(UserWarning) == 1
    reference, _ = fit(with_layer(layers.BatchNormalization), {}, dense_data(36), 12, epochs=1)
    assert relative_difference(averages(model), averages(reference), start) > 1e-2


class OwnStep(AccumulatingModel, keras.Model):
    """Calls a layer, updates by its outputs, and calls it again."""

    def __init__(self):
        super().__init__()
        self.normal, self.dense = layers.BatchNormalization(momentum=0.5), layers.Dense(2)

    def call(self, x, training=None):
        return self.dense(self.normal(x, training=training))

    def train_step(self, data):
        x, y = data
        for inputs in (x, 2 * x + 1):
            with tf.GradientTape() as tape:
                loss = tf.sqrt(tf.reduce_mean(tf.square(self(inputs, training=True) - y)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_ones_own_that_calls_a_layer_twice(way, float64):
    trained = []
    for size in (5, None):
        model = seeded(OwnStep)
        model(np.zeros((1, 4)))
        model.compile("sgd", microbatch_size=size, **WAYS[way])
        start = averages(model)
        model.fit(*dense_data(24), batch_size=12, shuffle=False, verbose=0)
        trained.append(averages(model))
    assert relative_difference(*trained, start) <= TOLERANCE["float64"]


class Sometimes(keras.Model):
    """Calls one of two layers, by what a microbatch begins with."""

    def __init__(self):
        super().__init__()
        self.a, self.b = layers.BatchNormalization(), layers.BatchNormalization()
        self.dense = layers.Dense(2)

    def call(self, x, training=None):
        y = self.a(x, training=training)
        if x[0, 0] > 0:
            y += self.b(x, training=training)
        return self.dense(y)


@pytest.mark.parametrize("begins", [1, -1])
def test_eagerly_a_layer_may_be_called_less_often_but_not_later(begins, float64):
    x, y = dense_data(12)
    x[::4, 0] = [begins, -begins, -begins]
    model = accumulate(seeded(Sometimes), microbatch_size=4, loss_over="microbatch")
    model(x)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    if begins < 0:
        with pytest.raises(RuntimeError, match="the same BatchNormalization layers"):
            model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
        assert not np.any(model.a.moving_mean.numpy())
        return
    model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    for layer, rows in ((model.a, x), (model.b, x[:4])):
        np.testing.assert_allclose(layer.moving_mean, 0.01 * rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(layer.moving_variance, 0.99 + 0.01 * rows.var(0), rtol=1e-12)


class InABranch(keras.Model):
    def __init__(self):
        super().__init__()
        self.normal, self.dense = layers.BatchNormalization(name="bn"), layers.Dense(2)
        self.chosen = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x, training=None):
        normal = lambda: self.normal(x, training=training)  # noqa: E731
        return self.dense(tf.cond(self.chosen > 0, normal, lambda: x))


@pytest.mark.parametrize("settings", ["split", "windows"])
def test_a_call_in_a_branch_moves_them_itself_and_is_told(settings):
    own, rows = SETTINGS[settings]
    model = InABranch()
    model(np.zeros((1, 4)))
    accumulate(model, **own).compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"\['bn'\].*once per microbatch"):
        model.fit(*dense_data(24), batch_size=rows, verbose=0)
    assert np.any(model.normal.moving_mean.numpy())


class InATracedFunction(keras.Model):
    """Calls a layer, and a function that has traced another call of it before."""

    def __init__(self):
        super().__init__()
        self.normal, self.dense = layers.BatchNormalization(name="bn"), layers.Dense(2)
        self.traced = tf.function(lambda x: self.normal(2 * x, training=True))

    def call(self, x, training=None):
        return self.dense(self.normal(x, training=training) + self.traced(x))


@pytest.mark.parametrize("settings", ["split", "windows", "recomputed"])
def test_a_call_in_a_function_that_was_traced_before_moves_them_itself_and_is_told(settings):
    own, rows = SETTINGS[settings]
    model = InATracedFunction()
    x, y = dense_data(24)
    model.traced(tf.constant(x[:rows]))
    model(x)
    model.normal.moving_mean.assign(tf.zeros(4))
    moves = []
    accumulate(model, **own).compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"\['bn'\].*once per microbatch"):
        model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    size = own.get("microbatch_size", rows)
    for start in range(0, 24, rows):
        batch = x[start : start + rows]
        moves += [batch[begin : begin + size].mean(0) for begin in range(0, rows, size)]
    expected = np.zeros(4)
    for move in moves:
        for factor in (1.0, 2.0):
            expected = 0.99 * expected + 0.01 * factor * move
    np.testing.assert_allclose(model.normal.moving_mean, expected, rtol=1e-4)


def operations(graph):
    """Return the operations of a graph and of all functions that it may call."""
    definition = graph.as_graph_def()
    functions = [node for f in definition.library.function for node in f.node_def]
    return [node.op for node in (*definition.node, *functions)]


@pytest.mark.parametrize("settings", ["split", "recomputed", "windows", "both"])
def test_no_pass_over_activations_and_no_buffer_is_added(settings):
    """A layer that is not heard reduces as often. What is kept are two vectors for each layer."""
    own, rows = SETTINGS[settings]
    x, y = dense_data(12, 7)
    reductions = []
    for layer in (layers.BatchNormalization, MovesItself):
        normal = layer(scale=False, center=False)
        model = accumulate(keras.Sequential([keras.Input((7,)), normal, layers.Dense(2)]), **own)
        model.compile("sgd", "mse")
        draw = tf.function(lambda data, model=model: model.train_step(data), autograph=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = draw.get_concrete_function((tf.constant(x[:rows]), tf.constant(y[:rows]))).graph
        found = operations(graph)
        reductions.append([found.count(name) for name in ("Mean", "SquaredDifference")])
        if layer is MovesItself:
            break
        living = [v for v in gc.get_objects() if issubclass(type(v), tf.Variable)]
        kept = [v for v in living if v.shape == (7,) and "moving" not in v.name]
        assert len(kept) == (2 if "accumulation_steps" in own else 0)
    assert reductions[0] == reductions[1]
    assert reductions[0][0] > 0


@pytest.mark.gate
def test_layers_are_left_as_they_were():
    for settings in SETTINGS.values():
        model, _ = fit(first, settings[0], dense_data(24), settings[1])
        for layer in model.layers:
            assert not {"_moments", "call"} & set(vars(layer))


@pytest.mark.gate
@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("settings", ["split", "windows", "both", "recomputed"])
def test_of_replicas_as_plain_keras_has_them(settings, synchronized, float64):
    """Each has the averages of its own samples; synchronized, all have those of all samples."""
    own, rows = SETTINGS[settings]
    if synchronized and "microbatch_size" in own:
        pytest.skip("refused: replicas cannot exchange statistics inside of a loop")
    x, y = dense_data(24)
    # Of each batch the first replica takes the first half.
    order = np.arange(24).reshape(2, 12 // rows, 2, rows // 2)
    order = order.transpose(0, 2, 1, 3).ravel()
    trained = []
    for given, batch, data in ((own, rows, (x, y)), ({}, 12, (x[order], y[order]))):
        with mirrored(2).scope():
            model = accumulate(seeded(lambda: first(synchronized=synchronized)), **given)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        start = averages(model)
        model.fit(*data, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        normal = [m for m in model.layers if isinstance(m, layers.BatchNormalization)]
        variables = [v.value for layer in normal for v in layer.non_trainable_variables]
        trained.append([copy.numpy() for v in variables for copy in v.values])
    start = [value for value in start for _ in range(2)]
    assert relative_difference(*trained, start) <= TOLERANCE["float64"]


def test_moments_of_parts_are_those_of_all(float64):
    values = np.random.default_rng(1).normal(1e3, 1.0, size=(17, 3)).astype("float32")
    total = None
    for part in np.split(values, [1, 1, 6, 16]):
        part = tf.constant(part)
        mean, variance = tf.nn.moments(part, [0])
        count = tf.constant(float(len(part)), tf.float64)
        moments = Moments.of(count, mean, variance, 0.0)
        total = moments if total is None else total.plus(moments)
    exact = values.astype("float64")
    assert float(total.parts) == 4  # one has no values
    np.testing.assert_allclose(total.mean, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(total.variance, exact.var(0), rtol=1e-4)
