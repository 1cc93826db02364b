"""What a step does beside its gradients: refused, told of, or done once per update."""

import re
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import TOLERANCE, assert_changed, dense_data, dense_model, relative_difference, seeded
from keras import layers

from ga_model import AccumulatingModel, accumulate

pytestmark = pytest.mark.filterwarnings("ignore:What a custom loss averages")  # eagerly

EAGER, XLA = {"run_eagerly": True}, {"jit_compile": True}
of_script = types.SimpleNamespace()  # the globals of a training script

SETTINGS = {
    "steps": {"accumulation_steps": 3},
    "size": {"microbatch_size": 5},
    "adding up": {"microbatch_size": 5, "loss_over": "microbatch"},
    "both": {"accumulation_steps": 3, "microbatch_size": 3},
    "skipping": {"microbatch_size": 5, "skip_nonfinite": True},
}


class OwnStep(keras.Model):
    """Trains one network, and has another one beside it."""

    def __init__(self):
        super().__init__()
        self.net, self.target = dense_model(), dense_model()
        self.count = tf.Variable(0.0, trainable=False, dtype=keras.config.floatx(), name="count")

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.net(x, training=True) - y - self.target(x)))
        variables = self.net.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.beside(loss)
        return {"loss": loss}

    def beside(self, loss):
        pass


class MovesItsTarget(OwnStep):
    def beside(self, loss):
        for slow, fast in zip(self.target.weights, self.net.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)


class MovesItOnUpdate(OwnStep):
    on_update = lambda self: MovesItsTarget.beside(self, None)  # noqa: E731


class OfTheMixin(AccumulatingModel, MovesItOnUpdate):
    pass


def fit(model, rows, **compile_args):
    x, y = dense_data(44)
    model.compile(keras.optimizers.Adam(0.01), **compile_args)
    model.optimizer.build(model.net.trainable_variables)
    model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return model


def weights_of(model):
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("way", [{}, EAGER, XLA])
@pytest.mark.parametrize("make", [MovesItOnUpdate, OfTheMixin])
def test_what_happens_on_update_happens_once_per_update(make, way, settings, float64):
    settings = SETTINGS[settings]
    rows = 24 // settings.get("accumulation_steps", 1)
    model = seeded(make)
    start = model.get_weights()
    model = fit(accumulate(model, **settings), rows, **way)
    reference = fit(seeded(MovesItsTarget), 24, **way)
    assert_changed(reference.get_weights(), start)
    start += [np.zeros_like(value) for value in weights_of(reference)[len(start) :]]
    difference = relative_difference(weights_of(model), weights_of(reference), start)
    assert difference < TOLERANCE[float64]


@pytest.mark.parametrize("way", [{}, EAGER])
def test_it_happens_without_settings_too(way, float64):
    model, reference = (fit(seeded(make), 24, **way) for make in (OfTheMixin, MovesItsTarget))
    for w, r in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(w, r, rtol=1e-12)


class OfALayer(keras.layers.Layer):
    """Moves a state when it is called."""

    def __init__(self):
        super().__init__()
        self.center = self.add_weight(shape=(6,), initializer="zeros", trainable=False)

    def call(self, x):
        self.center.assign(0.9 * self.center + 0.1 * keras.ops.mean(x, axis=0))
        return x - self.center


class AQueue(OwnStep):
    def beside(self, loss):
        self.count.assign_add(1.0)


class Frozen(MovesItsTarget):
    def __init__(self):
        super().__init__()
        self.target.trainable = False


@pytest.mark.parametrize("way", [{}, EAGER, XLA])
@pytest.mark.parametrize(
    ("make", "names"),
    [(MovesItsTarget, r"\['sequential_1/.*/kernel'"), (Frozen, "kernel"), (AQueue, r"\['count'\]")],
)
def test_a_step_that_writes_to_variables_is_told_of_once(make, names, way):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("ignore", "What a custom loss averages")
        fit(accumulate(seeded(make), accumulation_steps=3), 8, **way)
    (said,) = (str(warning.message) for warning in caught)
    assert re.search(f"`train_step` .* writes to .*{names}.*on_update", said)


@pytest.mark.parametrize("make", [MovesItsTarget, Frozen, AQueue, MovesItOnUpdate])
def test_on_the_full_batch_it_is_not(make):
    fit(accumulate(seeded(make), microbatch_size=5), 24)


class AppliesAnother(OwnStep):
    def beside(self, loss):
        variables = self.target.trainable_variables
        of_script.optimizer.apply([tf.ones_like(v) for v in variables], variables)


@pytest.mark.parametrize("way", [{}, EAGER])
@pytest.mark.parametrize("is_built", [False, True])
def test_an_optimizer_by_another_name_is_refused_before_anything_is_trained(way, is_built):
    model = accumulate(seeded(AppliesAnother), accumulation_steps=3)
    of_script.optimizer = keras.optimizers.SGD(name="of_the_script")
    if is_built:
        of_script.optimizer.build(model.target.trainable_variables)
    start = model.get_weights()
    with pytest.raises(RuntimeError, match=r"applies \['of_the_script'\], stored in a global"):
        fit(model, 8, **way)
    for w, s in zip(model.get_weights(), start, strict=True):
        np.testing.assert_array_equal(w, s)


def test_on_the_full_batch_it_is_not_refused():
    of_script.optimizer = keras.optimizers.SGD(name="of_the_script")
    of_script.optimizer.build((model := seeded(AppliesAnother)).target.trainable_variables)
    fit(accumulate(model, microbatch_size=5), 24)


# Layers.


def stack(*parts):
    return lambda: keras.Sequential([keras.Input((4,)), *(make() for make in parts)])


def compiled(make, settings, **compile_args):
    model = seeded(make)
    if settings:
        model = accumulate(model, **settings)
    model.compile(keras.optimizers.Adam(0.01), "mse", **compile_args)
    return model


def spectral():
    return layers.SpectralNormalization(layers.Dense(6, activation="tanh"))


STATES = {
    "spectral normalization": stack(spectral, lambda: layers.Dense(2)),
    "a center": stack(lambda: layers.Dense(6, "tanh"), OfALayer, lambda: layers.Dense(2)),
}


@pytest.mark.parametrize("way", [{}, EAGER, XLA])
@pytest.mark.parametrize("name", STATES)
def test_layers_that_change_by_their_calls_match_the_full_batch(name, way, float64):
    x, y = dense_data(44)
    trained = []
    for settings in ({}, {"microbatch_size": 5}):
        # Of a metric that is made while it is found out that nothing may be added up.
        model = compiled(STATES[name], settings, metrics=["mae"], **way)
        start = model.get_weights()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A call of .* takes the memory of the full batch")
            model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    assert relative_difference(trained[1], trained[0], start) < TOLERANCE[float64]


@pytest.mark.parametrize("way", [{}, EAGER, XLA])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("settings", ["steps", "adding up"])
def test_added_up_they_are_told_of(settings, name, way):
    model = compiled(STATES[name], SETTINGS[settings], **way)
    with pytest.warns(UserWarning, match="or a layer that it calls, writes to") as caught:
        model.fit(*dense_data(24), batch_size=6, verbose=0)
    assert [w.category for w in caught].count(UserWarning) == 1


class FrozenByItsCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = layers.BatchNormalization(), layers.Dense(2)

    def call(self, x):
        return self.dense(self.norm(x, training=False))


def training():
    return stack(lambda: layers.BatchNormalization(name="bn"), lambda: layers.Dense(2))()


@pytest.mark.parametrize("way", [{}, EAGER, XLA])
@pytest.mark.parametrize("settings", [n for n in SETTINGS if n != "skipping"])
def test_batch_normalization_is_told_of_where_it_trains(settings, way):
    settings = SETTINGS[settings]
    compiled(FrozenByItsCall, settings, **way).fit(*dense_data(24), batch_size=6, verbose=0)
    with pytest.warns(UserWarning, match=r"BatchNormalization layers .*: \['bn'\]") as caught:
        compiled(training, settings, **way).fit(*dense_data(24), batch_size=6, verbose=0)
    assert [w.category for w in caught].count(UserWarning) == 1


# What nothing has to be said of.

tracker = keras.metrics.Mean(name="tracker")


class OfAGuide(OwnStep):
    """Draws random numbers in every way, and tracks its loss by a global name."""

    def __init__(self):
        super().__init__()
        self.drop, self.seeds = layers.Dropout(0.3), keras.random.SeedGenerator(1)
        self.draws = tf.random.Generator.from_seed(1)

    def beside(self, loss):
        tracker.update_state(loss)
        self.drop(tf.ones((2, 2)), training=True)
        keras.random.normal((2,), seed=self.seeds)
        self.draws.normal((2,))


@pytest.mark.parametrize("way", [{}, EAGER])
@pytest.mark.parametrize("settings", [n for n in SETTINGS if n != "adding up"])
def test_metrics_and_random_state_are_not_told_of(settings, way):
    fit(accumulate(seeded(OfAGuide), **SETTINGS[settings]), 8, **way)
