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


# What a step sets of its optimizer.


@tf.function
def halved(rate):
    return 0.5 * rate


def set_in_a_branch(optimizer, condition, value):
    rate = optimizer.learning_rate
    tf.cond(condition, lambda: rate.value.assign(value(rate)), lambda: tf.identity(rate.value))


SCHEDULE = keras.optimizers.schedules.CosineDecay(0.05, 4, warmup_target=0.1, warmup_steps=2)
# Of the optimizer, the model's loss, and its metric for it, before the update.
RATES_TOLD = {
    "its own": lambda o, loss, m: o.learning_rate.assign(0.9 * o.learning_rate),
    "of the loss": lambda o, loss, m: o.learning_rate.assign(0.1 * loss),
    "less": lambda o, loss, m: o.learning_rate.assign_sub(0.001),
    "of a metric": lambda o, loss, m: o.learning_rate.assign(0.1 * m.result()),
    "a function": lambda o, loss, m: o.learning_rate.assign(halved(o.learning_rate.value)),
    "a branch": lambda o, loss, m: set_in_a_branch(o, o.iterations > 0, lambda rate: rate / 2),
    "if the loss is": lambda o, loss, m: set_in_a_branch(o, loss > 1.8, lambda _: 0.0),
}
RATES_EXACT = {
    "schedule": lambda o, loss, m: o.learning_rate.assign(SCHEDULE(o.iterations)),
    "constant": lambda o, loss, m: o.learning_rate.assign(0.05),
    "attribute": lambda o, loss, m: setattr(o, "learning_rate", 0.05),
    "branch": lambda o, loss, m: set_in_a_branch(o, o.iterations > 0, lambda _: 0.05),
}


class SetsItsRate(OwnStep):
    def __init__(self, set_rate, late=False):
        super().__init__()
        self.set_rate, self.late = set_rate, late
        self.tracker = keras.metrics.Mean()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.net(x, training=True) - y))
        self.tracker.update_state(loss)
        variables = self.net.trainable_variables
        gradients = tape.gradient(loss, variables)
        if not self.late:
            self.set_rate(self.optimizer, loss, self.tracker)
        self.optimizer.apply(gradients, variables)
        if self.late:
            self.set_rate(self.optimizer, loss, self.tracker)
        return {"loss": self.tracker.result()}


def said_of(make, **settings):
    """Return what is said, and how far the training is from the full batch."""
    models = [accumulate(seeded(make), **settings), seeded(make)]
    start = models[1].get_weights()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for model, rows in zip(models, (24 // settings.get("accumulation_steps", 1), 24)):
            fit(model, rows)
    weights, expected = (model.get_weights() for model in models)
    assert_changed(expected, start)
    said = [str(w.message) for w in caught if w.category is UserWarning]
    return said, relative_difference(weights, expected, start)


@pytest.mark.parametrize("settings", ["steps", "adding up", "both"])
@pytest.mark.parametrize("name", RATES_TOLD)
def test_a_rate_that_a_step_moves_by_itself_is_told_of(name, settings, float64):
    (said,), off = said_of(lambda: SetsItsRate(RATES_TOLD[name]), **SETTINGS[settings])
    assert re.search(r"writes to \['\S*learning_rate'\].*on_update", said)
    assert off > 1e-3


@pytest.mark.parametrize("settings", ["steps", "adding up", "both", "size"])
@pytest.mark.parametrize("name", RATES_EXACT)
def test_a_rate_that_is_the_same_for_all_microbatches_is_not(name, settings, float64):
    said, off = said_of(lambda: SetsItsRate(RATES_EXACT[name]), **SETTINGS[settings])
    assert not said
    assert off < TOLERANCE[float64]


def test_a_rate_that_is_set_after_the_update_is_told_of(float64):
    """The window updates later."""
    (said,), off = said_of(lambda: SetsItsRate(RATES_EXACT["constant"], True), accumulation_steps=3)
    assert "learning_rate" in said
    assert off > 1e-3


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
    with pytest.raises(RuntimeError, match=r"applies \['of_the_script'\], reached by a global"):
        fit(model, 8, **way)
    for w, s in zip(model.get_weights(), start, strict=True):
        np.testing.assert_array_equal(w, s)


class AppliesItsOwn(OwnStep):
    """Reaches optimizers that it has by other names."""

    def __init__(self):
        super().__init__()
        self.second = keras.optimizers.SGD(0.1, momentum=0.9, name="second")
        of_script.by_name = {"second": self.second}

    def compile(self, optimizer, **arguments):
        super().compile(optimizer, **arguments)
        of_script.by_name["compiled"] = self.optimizer

    def train_step(self, data):
        x, y = data
        parts = self.net.trainable_variables, self.target.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.net(x) + self.target(x) - y))
        for name, given, part in zip(of_script.names, tape.gradient(loss, parts), parts):
            by_itself = {"self.optimizer": self.optimizer, "self.second": self.second}
            optimizer = by_itself[name] if name in by_itself else of_script.by_name[name]
            optimizer.apply(given, part)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("names", "applies"),
    [
        (["self.optimizer", "second"], r"\['second'\].*instead of `self.second`"),
        (["compiled", "self.second"], r"\['adam.*'\].*instead of `self.optimizer`"),
        (["compiled", "second"], "instead of `self.second` and `self.optimizer`"),
    ],
)
@pytest.mark.parametrize("way", [{}, EAGER])
@pytest.mark.parametrize("settings", ["steps", "both", "adding up"])
def test_an_attribute_that_is_reached_by_a_global_is_refused(settings, way, names, applies):
    of_script.names = names
    model = accumulate(seeded(AppliesItsOwn), **SETTINGS[settings])
    start = model.get_weights()
    for _ in range(2):  # what the first one has made has no values
        with pytest.raises(RuntimeError, match=applies):
            fit(model, 8, **way)
    for w, s in zip(model.get_weights(), start, strict=True):
        np.testing.assert_array_equal(w, s)


@pytest.mark.parametrize("way", [{}, EAGER])
def test_the_full_batch_takes_it_by_any_name(way, float64):
    trained = []
    for names in (["self.optimizer", "self.second"], ["compiled", "second"]):
        of_script.names = names
        trained.append(fit(accumulate(seeded(AppliesItsOwn), microbatch_size=5), 24, **way))
    reference = fit(seeded(AppliesItsOwn), 24, **way)
    for model in trained:
        for w, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(w, expected, rtol=1e-10, atol=1e-14)


class SetsItsCounter(OwnStep):
    """Adam corrects its moments by how often it was applied."""

    is_late = False

    def train_step(self, data):
        if not self.is_late:
            self.optimizer.iterations.assign(5)
        return super().train_step(data)

    def beside(self, loss):
        if self.is_late:
            self.optimizer.iterations.assign(5)


class SetsItTooLate(SetsItsCounter):
    is_late = True


def test_a_counter_that_is_set_before_the_update_is_exact(float64):
    said, off = said_of(SetsItsCounter, accumulation_steps=3)
    assert not said
    assert off < TOLERANCE[float64]


@pytest.mark.parametrize("way", [{}, EAGER])
def test_a_counter_that_is_set_after_the_update_is_told_of(way, float64):
    with pytest.warns(UserWarning, match=r"writes to \['\S*iteration'\].*on_update"):
        fit(accumulate(seeded(SetsItTooLate), accumulation_steps=3), 8, **way)


@pytest.mark.parametrize("way", [{}, EAGER])
@pytest.mark.parametrize("is_built", [False, True])
def test_an_optimizer_inside_another_one_is_known(is_built, way):
    model = accumulate(seeded(dense_model), accumulation_steps=3)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, name="inside"))
    model.compile(optimizer, "mse", **way)
    if is_built:
        optimizer.build(model.trainable_variables)
    start = model.get_weights()
    model.fit(*dense_data(24), batch_size=8, verbose=0)
    assert_changed(model.get_weights(), start)


class MakesItsOptimizer(OwnStep):
    def beside(self, loss):
        if not hasattr(of_script, "made"):
            of_script.made = keras.optimizers.SGD(name="made")
        variables = self.target.trainable_variables
        of_script.made.apply([tf.ones_like(v) for v in variables], variables)


def test_an_optimizer_that_an_eager_step_makes_is_refused():
    model = accumulate(seeded(MakesItsOptimizer), accumulation_steps=3)
    start = model.get_weights()
    with pytest.raises(RuntimeError, match=r"applies \['made'\], reached by a global"):
        fit(model, 8, **EAGER)
    for w, s in zip(model.get_weights(), start, strict=True):
        np.testing.assert_array_equal(w, s)


def test_a_refused_graph_leaves_no_trouble_to_an_eager_model():
    """Its optimizer has variables without values."""
    of_script.names = ["compiled", "second"]
    first = accumulate(seeded(AppliesItsOwn), accumulation_steps=3)
    with pytest.raises(RuntimeError, match="reached by a global"):
        fit(first, 8)
    with pytest.raises(RuntimeError, match="reached by a global"):
        fit(accumulate(seeded(AppliesItsOwn), accumulation_steps=3), 8, **EAGER)


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


def test_an_optimizer_of_another_model_may_accumulate_by_itself():
    """It is looked at where a step writes to something that no layer or optimizer of it has."""
    other = keras.optimizers.Adam(gradient_accumulation_steps=2)
    other.build([keras.Variable(1.0)])
    fit(accumulate(seeded(OfAGuide), accumulation_steps=2), 8)


# Metrics that a step computes with.


class UsesItsMetric(OwnStep):
    """Has the mean of all losses so far in its loss, or only beside it."""

    def __init__(self, use, tracker=None):
        super().__init__()
        self.use = use
        self.tracker = tracker or keras.metrics.Mean(name="so_far")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.net(x, training=True) - y))
            self.tracker.update_state(loss)
            loss = self.use(loss, self.tracker)
        variables = self.net.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, **{m.name: m.result() for m in self.metrics}}


def updated_in(loss, metric):
    tf.function(lambda: metric.update_state(loss))()
    return loss


METRICS_TOLD = {
    "scaled": lambda loss, metric: loss / (1.0 + metric.result()),
    "a power": lambda loss, metric: tf.stop_gradient(metric.result()) * loss,
    "a function": lambda loss, metric: loss * tf.function(lambda: metric.result())(),
}
METRICS_EXACT = {
    "logged": lambda loss, metric: loss,
    "added": lambda loss, metric: loss + 3.0 * tf.stop_gradient(metric.result()),
    "updated in a function": updated_in,
}


@pytest.mark.parametrize("settings", ["steps", "adding up", "both"])
@pytest.mark.parametrize("name", METRICS_TOLD)
def test_a_metric_that_a_loss_uses_is_told_of(name, settings, float64):
    (said,), off = said_of(lambda: UsesItsMetric(METRICS_TOLD[name]), **SETTINGS[settings])
    assert re.search(r"gradients depend on \['so_far/\S*'.*of a metric", said)
    assert off > 1e-3


@pytest.mark.parametrize("settings", ["steps", "adding up", "both"])
@pytest.mark.parametrize("name", METRICS_EXACT)
def test_a_metric_that_no_gradient_follows_from_is_not(name, settings, float64):
    said, off = said_of(lambda: UsesItsMetric(METRICS_EXACT[name]), **SETTINGS[settings])
    assert not said
    assert off < TOLERANCE[float64]


@pytest.mark.parametrize(
    "make",
    [
        lambda: UsesItsMetric(METRICS_TOLD["scaled"]),
        lambda: SetsItsRate(RATES_TOLD["its own"]),
        lambda: SetsItsRate(RATES_TOLD["of a metric"]),
        lambda: SetsItsRate(RATES_EXACT["constant"], late=True),
    ],
)
def test_on_the_full_batch_both_match_without_a_word(make, float64):
    said, off = said_of(make, microbatch_size=5)
    assert not said
    assert off < TOLERANCE[float64]
