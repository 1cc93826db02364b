"""Both styles, custom steps, several optimizers, and what is refused."""

import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    assert_changed,
    dense_data,
    dense_model,
    difference_of_fits,
    relative_difference,
    seeded,
)

from ga_model import AccumulatingModel, accumulate


class Net(keras.Model):
    """Made both by subclassing and by a functional call."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not args and "inputs" not in kwargs:
            self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)


class AccumulatingNet(AccumulatingModel, keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="tanh")
        self.head = keras.layers.Dense(2)

    def call(self, inputs):
        return self.head(self.hidden(inputs))


class AccumulatingFunctional(AccumulatingModel, keras.Model):
    pass


def functional(cls):
    inputs = keras.Input((4,))
    return cls(inputs, keras.layers.Dense(2)(keras.layers.Dense(6, activation="tanh")(inputs)))


STYLES = {
    "subclassed": AccumulatingNet,
    "functional call of a subclass": lambda: functional(AccumulatingFunctional),
    "wrapped Functional": lambda: functional(keras.Model),
    "wrapped Sequential": dense_model,
    "wrapped unbuilt Sequential": lambda: keras.Sequential(
        [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(2)]
    ),
    "Sequential subclass": lambda: type("S", (AccumulatingModel, keras.Sequential), {})(
        dense_model().layers
    ),
    "wrapped subclass": lambda: Net(name="net"),
}


def arguments():
    return {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"}


@pytest.mark.parametrize("style", STYLES)
def test_every_style_matches_the_whole_batch(style, float64):
    difference = difference_of_fits(STYLES[style], arguments, dense_data(34), rows=4, steps=3)
    assert difference <= TOLERANCE[float64]


def test_both_styles_live_in_one_process(float64):
    """Keras rewrites the bases of a class that is called with functional arguments, for good."""
    for _ in range(2):
        for style in ("functional call of a subclass", "subclassed", "wrapped Functional"):
            test_every_style_matches_the_whole_batch(style, float64)
    assert AccumulatingModel.__bases__ == (object,)
    assert AccumulatingNet.__bases__ == (AccumulatingModel, keras.Model)


def test_accumulate_returns_the_same_object_with_the_same_parts():
    model = dense_model()
    layers, weights = model.layers, [id(w) for w in model.weights]
    wrapped = accumulate(model, accumulation_steps=2)
    assert wrapped is model
    assert isinstance(model, AccumulatingModel)
    assert isinstance(model, keras.Sequential)
    assert model.__class__ is keras.Sequential
    assert model.layers == layers
    assert [id(w) for w in model.weights] == weights
    assert accumulate(model, accumulation_steps=5) is model
    assert model.accumulation_steps == 5
    assert accumulate(model).accumulation_steps == 5


def test_a_compiled_and_trained_model_can_be_wrapped(float64):
    x, y = dense_data(34)
    model, reference = seeded(dense_model), seeded(dense_model)
    for m in (model, reference):
        m.compile(**arguments())
        m.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    start = reference.get_weights()
    optimizer = model.optimizer
    accumulate(model, accumulation_steps=3)
    assert model.optimizer is optimizer
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    reference.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    assert model.optimizer.iterations == 9
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[float64]


def test_compile_keeps_the_setting_unless_it_is_given():
    model = AccumulatingNet()
    assert model.accumulation_steps == 1
    model.compile("sgd", "mse", accumulation_steps=4)
    model.compile("sgd", "mse")
    assert model.accumulation_steps == 4
    model.compile("sgd", "mse", accumulation_steps=np.int64(2))
    assert model.accumulation_steps == 2
    assert type(model.accumulation_steps) is int


def test_layers_frozen_before_a_second_compile_stay_as_they_are(float64):
    x, y = dense_data(34)
    model, reference = seeded(dense_model), seeded(dense_model)
    accumulate(model, accumulation_steps=3)
    start = model.get_weights()
    for trainable in (True, False, True):
        for m, rows in ((model, 4), (reference, 12)):
            m.layers[0].trainable = trainable
            m.compile(**arguments())
            m.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE[float64]


# A `train_step` of the user's own.


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


class MixinOnTheLeft(StepFromAMixin, AccumulatingNet):
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


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        Distance,
        OwnLoss,
        AccumulatingOwnLoss,
        OwnStepInSubclass,
        MixinOnTheLeft,
        CompiledStep,
        AccumulatingCompiledStep,
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


@pytest.mark.parametrize("when", ["subclass", "wrapped before compile", "wrapped after compile"])
@pytest.mark.parametrize("step", [TwoOptimizers, Sequential, InAList])
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
        model.fit(x, y, batch_size=4 if accumulates else 12, epochs=2, shuffle=False, verbose=0)
        assert [int(o.iterations) for o in optimizers] == [6, 6]
        trained.append(model.get_weights())
    assert_changed(trained[1], start)
    assert relative_difference(*trained, start) <= TOLERANCE[float64]


class AppliesTwice(OwnLoss):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


class AppliesNone(OwnLoss):
    def train_step(self, data):
        return {"loss": tf.reduce_mean(self(data[0]))}


class AppliesAnInnerModels(OwnLoss):
    def __init__(self):
        super().__init__()
        self.net.compile(keras.optimizers.SGD(name="inner"))

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
        (AppliesTwice, "applies the optimizer 'sgd' twice"),
        (AppliesNone, "applies none"),
        (AppliesAnInnerModels, r"applies \['inner'\] of a model inside of it"),
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
    with pytest.raises(RuntimeError, match=r"applies one inside of `tf\.cond`"):
        model.fit(x, y, batch_size=4, verbose=0)


class SetsItsLearningRate(OwnLoss):
    """Writes to its optimizer, and applies without naming the variables."""

    def train_step(self, data):
        self.optimizer.learning_rate = 0.5
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        assert isinstance(self.optimizer, keras.optimizers.SGD)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


def test_a_step_can_write_to_its_optimizer_and_apply_without_variables(float64):
    def arguments():
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}

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


class FitWithoutCallbacks(OwnLoss):
    def fit(self, x, y, batch_size):
        return super().fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)


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


def test_a_fit_that_takes_no_callbacks_is_refused_only_where_it_accumulates():
    x, y = dense_data(12)
    model = accumulate(FitWithoutCallbacks(), accumulation_steps=1)
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=4)
    model.accumulation_steps = 3
    with pytest.raises(TypeError, match=r"Let it take `\*\*kwargs`"):
        model.fit(x, y, batch_size=4)


def test_a_train_step_on_the_instance_is_refused():
    x, y = dense_data(12)
    model = accumulate(dense_model(), accumulation_steps=3)
    model.compile("sgd", "mse")
    model.train_step = lambda data: {}
    with pytest.raises(TypeError, match="set on the instance"):
        model.fit(x, y, batch_size=4, verbose=0)


def test_a_model_without_trainable_weights_trains_as_plain_keras_does():
    x, y = dense_data(12)
    model = accumulate(dense_model(), accumulation_steps=3)
    model.trainable = False
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        model.fit(x, y, batch_size=4, verbose=0)


# Bad settings.

BAD_STEPS = [
    (0, ValueError),
    (-3, ValueError),
    (2.0, TypeError),
    (2.5, TypeError),
    ("4", TypeError),
    (True, TypeError),
    ([4], TypeError),
    (tf.constant(3.0), TypeError),
    (10**30, ValueError),
]


@pytest.mark.parametrize(("value", "error"), BAD_STEPS, ids=str)
@pytest.mark.parametrize("how", ["accumulate", "compile", "attribute"])
def test_bad_accumulation_steps_are_refused_and_change_nothing(how, value, error):
    model = AccumulatingNet() if how != "accumulate" else dense_model()
    model.compile("sgd", "mse")
    optimizer, before = model.optimizer, type(model)
    call = {
        "accumulate": lambda: accumulate(model, accumulation_steps=value),
        "compile": lambda: model.compile("adam", "mae", accumulation_steps=value),
        "attribute": lambda: setattr(model, "accumulation_steps", value),
    }[how]
    with pytest.raises(error, match=r"must be an integer >= 1\. Received: accumulation_steps="):
        call()
    assert model.optimizer is optimizer
    assert type(model) is before
    assert getattr(model, "accumulation_steps", 1) == 1


def doubly():
    return keras.optimizers.Adam(gradient_accumulation_steps=2)


@pytest.mark.parametrize("scaled", [False, True])
def test_double_accumulation_is_refused(scaled):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(doubly()) if scaled else doubly()

    model = AccumulatingNet()
    message = "accumulation_steps=4 and the optimizer .* with gradient_accumulation_steps=2"
    with pytest.raises(ValueError, match=message):
        model.compile(optimizer(), "mse", accumulation_steps=4)
    assert not model.compiled
    model.compile(optimizer(), "mse")  # with accumulation_steps=1 it is plain Keras
    with pytest.raises(ValueError, match=message):
        model.accumulation_steps = 4
    plain = dense_model()
    plain.compile(optimizer(), "mse")
    with pytest.raises(ValueError, match=message):
        accumulate(plain, accumulation_steps=4)
    assert not isinstance(plain, AccumulatingModel)


def test_double_accumulation_by_an_optimizer_set_later_is_refused():
    x, y = dense_data(12)
    model = accumulate(TwoOptimizers(), accumulation_steps=3)
    model.compile("placeholder", "placeholder")
    model.a_optimizer, model.b_optimizer = doubly(), keras.optimizers.SGD()
    with pytest.raises(ValueError, match="Gradients would be accumulated twice"):
        model.fit(x, y, batch_size=4, verbose=0)


def test_the_mixin_on_the_wrong_side_is_refused():
    with pytest.raises(TypeError, match="must stand left of the Keras model class"):
        type("Wrong", (keras.Model, AccumulatingModel), {})
    with pytest.raises(TypeError, match="must stand left of the Keras model class"):
        type("Wrong", (Net, AccumulatingModel), {})


def test_the_mixin_on_something_that_is_no_keras_model_is_refused():
    with pytest.raises(TypeError, match=r"no subclass of `keras\.Model`"):
        type("Wrong", (AccumulatingModel, keras.layers.Layer), {})
    with pytest.raises(TypeError, match=r"no subclass of `keras\.Model`"):
        type("Wrong", (AccumulatingModel,), {})()


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (None, "Make a"),
        (keras.Sequential, "Call the class"),
        ("model", "Make a"),
        (keras.layers.Dense(1), "Make a"),
    ],
    ids=repr,
)
def test_accumulate_refuses_what_is_no_model(value, hint):
    with pytest.raises(TypeError, match=f"takes a Keras model. Received: model=.*{hint}"):
        accumulate(value, accumulation_steps=2)


def test_another_backend_is_refused_at_import():
    script = (
        "import keras; keras.backend.backend = lambda: 'jax'\n"
        "try:\n    import ga_model\n"
        "except RuntimeError as e:\n    print(e)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "Received: keras.backend.backend()='jax'" in out
    assert "KERAS_BACKEND=tensorflow" in out


def test_the_checks_import_neither_tensorflow_nor_keras():
    script = (
        "import importlib.util as u, pathlib, sys\n"
        "path = pathlib.Path(u.find_spec('ga_model').origin).with_name('_validate.py')\n"
        "spec = u.spec_from_file_location('checks', path)\n"
        "checks = u.module_from_spec(spec); sys.modules['checks'] = checks\n"
        "spec.loader.exec_module(checks)\n"
        "assert checks.check_accumulation_steps(3) == 3\n"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_more_than_one_replica_is_refused_and_trains_without():
    script = (
        "import os; os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        "import keras, numpy as np, tensorflow as tf\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "two = 2 * [tf.config.LogicalDeviceConfiguration()]\n"
        "tf.config.set_logical_device_configuration(cpu, two)\n"
        "from ga_model import accumulate\n"
        "with tf.distribute.MirroredStrategy(['CPU:0', 'CPU:1']).scope():\n"
        "    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "    accumulate(model, accumulation_steps=2).compile('sgd', 'mse')\n"
        "x, y = np.ones((16, 4)), np.ones((16, 2))\n"
        "try:\n    model.fit(x, y, batch_size=4, verbose=0)\n"
        "except NotImplementedError as e:\n    print(e)\n"
        "model.accumulation_steps = 1\n"
        "model.fit(x, y, batch_size=4, verbose=0)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert "Received: MirroredStrategy with 2 replicas" in out


# Warnings.


def batch_normalized():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6),
            keras.layers.BatchNormalization(name="norm"),
            keras.Sequential([keras.layers.BatchNormalization(name="inner")]),
            keras.layers.Dense(2),
        ]
    )


def test_batch_normalization_is_named_once_per_compile():
    x, y = dense_data(12)
    model = accumulate(batch_normalized(), accumulation_steps=3)
    with pytest.warns(UserWarning, match=r"\['norm', 'inner'\]") as caught:
        model.compile("sgd", "mse")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)


class NormalizedWhenBuilt(keras.Model):
    def build(self, shape):
        self.norm = keras.layers.BatchNormalization(name="late")
        self.norm.build(shape)

    def call(self, inputs, training=None):
        return self.norm(inputs, training=training)


def test_batch_normalization_that_comes_with_the_first_batch_is_named_then():
    x, _ = dense_data(12)
    model = accumulate(NormalizedWhenBuilt(), accumulation_steps=3)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"\['late'\]") as caught:
        model.fit(x, x, batch_size=4, epochs=2, verbose=0)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_batch_normalization_is_named_when_a_compiled_model_is_wrapped_or_set():
    model = batch_normalized()
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"\['norm', 'inner'\]") as caught:
        accumulate(model, accumulation_steps=3)
    assert caught[0].filename == __file__
    model = accumulate(batch_normalized())
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"\['norm', 'inner'\]") as caught:
        model.accumulation_steps = 2
    assert caught[0].filename == __file__


def test_no_warning_for_frozen_batch_normalization_or_without_accumulation():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulate(batch_normalized(), accumulation_steps=1).compile("sgd", "mse")
        model = accumulate(batch_normalized(), accumulation_steps=3)
        for name in ("norm", "inner"):
            for layer in model._flatten_layers():
                if layer.name == name:
                    layer.trainable = False
        model.compile("sgd", "mse")


def test_frozen_batch_normalization_matches_the_whole_batch(float64):
    def make():
        model = batch_normalized()
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.trainable = False
        return model

    difference = difference_of_fits(make, arguments, dense_data(34), rows=4, steps=3)
    assert difference <= TOLERANCE[float64]


def test_a_sum_with_regularizers_in_a_step_without_scale_loss_is_warned_of():
    x, y = dense_data(12)
    model = Distance()
    model.net.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
    model.net.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
    accumulate(model, accumulation_steps=3)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile("sgd", loss, run_eagerly=True)
    with pytest.warns(UserWarning, match="only if `train_step` passes it through") as caught:
        model.fit(x, y, batch_size=4, verbose=0)
    assert len(caught) == 1
