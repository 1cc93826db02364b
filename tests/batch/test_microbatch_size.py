"""`microbatch_size`: a batch that goes through in parts makes plain Keras's update and its logs.

Covered by `test_zoo_matches_plain_keras_on_the_same_batches`, through `fit` in graph mode

    models       the ten of the zoo, the Embedding against Keras's own with its sparse gradients
    optimizers   Adam, and with `-m sweep` Nesterov momentum
    parts        batches of 12 rows by 5 (ragged), by 4 (even), by 16 (whole)
    epochs       with a ragged last batch of 7 rows
    dtypes       float32 to 1e-5, float64 to 1e-12, logs to 1e-6

The rest is shown on a small model each.
"""

import warnings
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import set_dtype
from counting import Counting
from helpers import (
    TOLERANCE,
    dense_data,
    dense_model,
    num_updates,
    relative_difference,
    seeded,
)
from own_steps import TwoOptimizers
from reductions import (
    two_masked_data,
)
from training import assert_equal_logs, train_pair
from zoo import embedding, embedding_data

from ga_model import AccumulatingModel, accumulate
from ga_model.bench import _bench
from ga_model.tools._process import in_own_process

WAYS = {
    "graph": {},
    "jit": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "steps_per_execution": {"steps_per_execution": 3},
}


# Terms that one weight per microbatch cannot serve.


@pytest.mark.gate
def test_looking_ahead_leaves_random_state_and_statistics_alone(float64):
    """Dropout draws as often, and running averages move as often, as there are microbatches."""

    def make(masked):
        a, b = keras.Input((5, 3)), keras.Input((5, 3))
        layers = keras.layers
        seeds = layers.Dropout(0.5, seed=1)
        statistics = layers.BatchNormalization()
        parts = [layers.Masking()(i) if masked else i for i in (a, b)]
        outputs = [statistics(seeds(layers.Dense(2, activation="tanh")(i))) for i in parts]
        return keras.Model([a, b], outputs), seeds

    drawn = []
    x, y = two_masked_data(24)
    for masked in (True, False):
        model, dropout = make(masked)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accumulate(model, microbatch_size=5)
            model.compile("sgd", ["mse", "mse"])
            model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
        drawn.append(dropout.seed_generator.state.numpy().tolist())
    assert drawn[0] == drawn[1]


# What a batch may hold.


class TakesAnything(keras.Model):
    """Sums up what its inputs have in every row."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def build(self, shape=None):
        self.dense.build((None, 4))

    def call(self, inputs):
        total = 0.0
        for value in tf.nest.flatten(inputs):
            if isinstance(value, tf.RaggedTensor):
                value = tf.reduce_sum(value, axis=1)
            elif isinstance(value, tf.SparseTensor):
                value = tf.sparse.to_dense(value)
            if value is not None:
                total = total + tf.cast(value, self.compute_dtype)
        return self.dense(total)


def rows_of(rows, features=4):
    return np.random.default_rng(8).normal(size=(rows, features)).astype(keras.config.floatx())


def ragged(rows):
    lengths = np.arange(rows) % 4
    return tf.RaggedTensor.from_row_lengths(rows_of(lengths.sum()), lengths)


def sparse(rows):
    dense = rows_of(rows)
    return tf.sparse.from_dense(np.where(dense > 0, dense, 0))


INPUTS = {
    "ragged": lambda n: ragged(n),
    "sparse": lambda n: sparse(n),
    "nested": lambda n: {"a": rows_of(n), "b": (rows_of(n) ** 2, {"c": rows_of(n) ** 3})},
    "everything": lambda n: {"a": ragged(n), "b": (sparse(n), rows_of(n))},
    "integers": lambda n: np.arange(4 * n).reshape(n, 4) % 5,
}


@pytest.mark.gate
@pytest.mark.parametrize(("weighted", "static"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", INPUTS)
def test_whatever_a_batch_holds_is_split_and_accumulated(kind, weighted, static, float64):
    rows = 24 if static else 31
    data = (INPUTS[kind](rows), rows_of(rows, 2), *((rows_of(rows, 1) ** 2,) if weighted else ()))
    dataset = tf.data.Dataset.from_tensor_slices(data)
    trained = []
    for size, steps in ((None, 1), (5, 1), (4, 1), (None, 3), (2, 3)):
        model = seeded(TakesAnything)
        model.build()
        accumulate(model, microbatch_size=size, accumulation_steps=steps)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        start = model.get_weights()
        batches = dataset.batch(12 // steps, drop_remainder=static)
        model.fit(batches, epochs=2, shuffle=False, verbose=0)
        trained.append(model)
    for model in trained[1:]:
        assert_equal_logs(model, trained[0])
        difference = relative_difference(model.get_weights(), trained[0].get_weights(), start)
        assert difference <= TOLERANCE[float64]


class Scaled(keras.Model):
    """Gets a dict whose `scale` all rows share, and None."""

    def __init__(self):
        super().__init__()
        self.dense = dense_model()

    def train_step(self, data):
        with tf.GradientTape() as tape:
            assert data["nothing"] is None
            loss = tf.reduce_mean(tf.square(self.dense(data["x"]) - data["y"])) * data["scale"]
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "first": data["x"][0], "rows": tf.shape(data["x"])[0]}


def test_a_batch_of_known_size_may_be_split_after_one_that_was_not():
    model = accumulate(seeded(dense_model), microbatch_size=4)
    model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices(dense_data(24))
    for rows in (4, 12):
        model.fit(data.batch(rows, drop_remainder=True), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 6 + 2


@pytest.mark.filterwarnings("ignore:A number that a metric or a log has:UserWarning")
@pytest.mark.parametrize("loss_over", ["microbatch", "auto"])
def test_scalars_and_none_are_part_of_every_microbatch(loss_over, float64):
    x, y = dense_data(12)
    data = {"x": x, "y": y, "scale": np.float64(3.0), "nothing": None}
    trained = []
    for size in (None, 5):
        model = seeded(Scaled)
        accumulate(model, microbatch_size=size, loss_over=loss_over)
        model.compile(keras.optimizers.SGD(0.1))
        start = model.get_weights()
        logs = [model.train_function(iter([data])) for _ in range(3) if model.make_train_function()]
        trained.append((model.get_weights(), logs))
    assert relative_difference(trained[1][0], trained[0][0], start) <= TOLERANCE[float64]
    for split, whole in zip(trained[1][1], trained[0][1], strict=True):
        np.testing.assert_allclose(split["loss"], whole["loss"], rtol=1e-12)
        assert split["rows"] == 12


def test_rows_keep_their_order(float64):
    seen = []

    class Watches(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            seen.extend(inputs[:, 0].numpy().tolist())
            return self.dense(inputs)

    model = accumulate(Watches(), microbatch_size=5)
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.arange(29.0)[:, None]
    model(x[:1])
    seen.clear()
    model.fit(x, x, batch_size=12, shuffle=False, verbose=0)
    assert seen == np.arange(29.0).tolist()


# Logs and metrics.


class OwnLogs(keras.Model):
    """Logs the loss in every way there is."""

    def __init__(self):
        super().__init__()
        self.net = dense_model()
        self.tracker = keras.metrics.Mean(name="tracked")
        self.trackers = {"other": keras.metrics.Mean(name="in_a_dict")}
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, inputs):
        return self.net(inputs)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        self.tracker.update_state(loss)
        self.trackers["other"].update_state(2.0 * loss)
        self.error.update_state(y, y_pred)
        return {
            "loss": loss,
            "double": 2.0 * loss,
            "tracked": self.tracker.result(),
            "by_another_name": self.tracker.result(),
            "error_by_another_name": self.error.result(),
            "error": self.error.result(),
            "nested": {"mean": tf.reduce_mean(y_pred, axis=0)},
        }


@pytest.mark.parametrize("way", ["graph", "jit", "eager"])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
@pytest.mark.parametrize("loss_over", ["microbatch", "auto"])
def test_logs_of_a_step_of_ones_own_are_those_of_the_whole_batch(
    loss_over, reduction, way, float64
):
    logs = []
    x, y = dense_data(33)
    for size in (None, 5):
        model = accumulate(seeded(OwnLogs), microbatch_size=size, loss_over=loss_over)
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model.compile(keras.optimizers.SGD(0.001), loss, **WAYS[way])
        model.build((None, 4))
        logs.append(
            [
                model.train_on_batch(x[i : i + 12], y[i : i + 12], return_dict=True)
                for i in (0, 12, 24)
            ]
        )
    for split, whole in zip(*logs, strict=True):
        assert split.keys() == whole.keys()
        for name in whole:
            if reduction == "sum" and name in ("double", "in_a_dict"):
                continue  # nothing says that these are sums
            for a, b in zip(tf.nest.flatten(split[name]), tf.nest.flatten(whole[name])):
                np.testing.assert_allclose(a, b, rtol=1e-12, err_msg=name)


class MyMean(keras.metrics.Mean):
    pass


class Trackers(NamedTuple):
    first: keras.metrics.Mean
    second: keras.metrics.Mean


class OwnTrackers(OwnLogs):
    """Keeps its metrics in every place there is, and updates them from everywhere."""

    def __init__(self):
        super().__init__()
        self.own_kind = MyMean(name="own_kind")
        self.weighted = keras.metrics.Mean(name="weighted")
        self.pair = Trackers(keras.metrics.Mean(name="first"), keras.metrics.Mean(name="second"))
        self.later = {}
        self.later["a"] = keras.metrics.Mean(name="later")
        self.in_function = keras.metrics.Mean(name="in_function")

    @tf.function
    def track(self, values):
        self.in_function.update_state(values)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - y_pred))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        error = tf.reduce_sum(tf.abs(y - y_pred), axis=1)
        valid = tf.reduce_sum(tf.cast(error > 1.0, error.dtype))
        over = tf.reduce_sum(tf.where(error > 1.0, error, 0.0))
        self.own_kind.update_state(loss)
        self.weighted.update_state(tf.math.divide_no_nan(over, valid), sample_weight=valid)
        self.pair.first.update_state(loss, sample_weight=2.0)
        self.pair.second.update_state(error)
        self.later["a"].update_state(loss)
        self.track(error)
        self.error.update_state(y, y_pred)
        trackers = (self.own_kind, self.weighted, *self.pair, self.later["a"], self.in_function)
        return {**{t.name: t.result() for t in trackers}, "error": tf.reduce_mean(error) / 2}


@pytest.mark.parametrize("way", ["graph", "jit", "eager"])
def test_trackers_are_those_of_the_whole_batch_wherever_they_are(way, float64):
    logs = []
    x, y = dense_data(33)
    for size in (None, 5):
        model = accumulate(seeded(OwnTrackers), microbatch_size=size)
        model.compile(keras.optimizers.SGD(0.001), "mse", **WAYS[way])
        model.build((None, 4))
        batches = [(x[i : i + 12], y[i : i + 12]) for i in (0, 12, 24)]
        logs.append([model.train_on_batch(*batch, return_dict=True) for batch in batches])
    for split, whole in zip(*logs, strict=True):
        assert split.keys() == whole.keys()
        for name in whole:
            np.testing.assert_allclose(split[name], whole[name], rtol=1e-12, err_msg=name)


class CountsRows(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.count = keras.metrics.Sum(name="count")

    def call(self, inputs):
        self.count.update_state(tf.ones_like(inputs[:, 0]))
        return inputs


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_looking_ahead_counts_nothing_twice(run_eagerly, float64):
    a, b = keras.Input((5, 3)), keras.Input((5, 3))
    hidden, counts = keras.layers.Dense(4, activation="tanh"), CountsRows()
    outputs = [hidden(keras.layers.Masking()(i)) for i in (counts(a), b)]
    model = accumulate(keras.Model([a, b], outputs), microbatch_size=5)
    model.compile("sgd", ["mse", "mse"], run_eagerly=run_eagerly)
    x, y = two_masked_data(24)
    y = [np.repeat(part, 2, axis=-1) for part in y]
    history = model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    assert history.history["count"] == [24 * 3]  # `inputs[:, 0]` has three entries a row


class Stateful(keras.metrics.Metric):
    """Counts rows and calls, and keeps the largest target."""

    def __init__(self, name="stateful"):
        super().__init__(name=name)
        self.rows = self.add_variable((), "zeros", name="rows")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(tf.cast(tf.shape(y_true)[0], self.rows.dtype))
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(tf.cast(y_true, "float64"))))

    def result(self):
        return {"rows_seen": self.rows.value, "largest": self.largest.value}


def test_every_metric_sees_every_row_once(float64):
    metrics = ["accuracy", "AUC", "R2Score", "Precision", Stateful]

    def arguments():
        made = [m() if m is Stateful else m for m in metrics]
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": made}

    def make():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="sigmoid")])

    x, y = dense_data(33)
    y = (y > 0).astype("float64")
    model, reference, _ = train_pair(make, arguments, (x, y), rows=12, steps=1, size=5)
    assert_equal_logs(model, reference, rtol=1e-9)
    assert model.history.history["rows_seen"] == [33, 33]


# Memory and time.


def test_no_buffer_outlives_the_step(float64):
    model = accumulate(dense_model(), microbatch_size=5)
    model.compile("adam", "mse")
    model.train_on_batch(*dense_data(12))
    assert model._accumulation.window is None
    made = []
    original = tf.Variable.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.Variable, "__init__", lambda *a, **k: made.append(a) or original(*a, **k))
        model.train_on_batch(*dense_data(12))
        model.fit(*dense_data(31), batch_size=12, verbose=0)
    assert not made


@pytest.mark.parametrize("jit_compile", [False, True])
def test_sparse_gradients_reach_the_optimizer_as_rows(jit_compile, float64):
    received = []

    class Watches(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            received.append(grads[0])
            return super().apply(grads, trainable_variables)

    x, y = embedding_data(33)
    trained = []
    for size in (None, 5):
        model = accumulate(seeded(embedding), microbatch_size=size)
        model.compile(Watches(0.1), "mse", jit_compile=jit_compile)
        start = model.get_weights()
        model.fit(x, y, batch_size=12, shuffle=False, epochs=2, verbose=0)
        trained.append(model.get_weights())
    assert all(isinstance(gradient, tf.IndexedSlices) for gradient in received)
    assert relative_difference(*trained, start) <= TOLERANCE[float64]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_nothing_is_traced_again_over_parts_tails_and_epochs(jit_compile, steps):
    model = Counting()
    model.build((None, 4))
    model = accumulate(model, accumulation_steps=steps, microbatch_size=5)
    model.compile("adam", "mse", jit_compile=jit_compile)
    model.optimizer.build(model.trainable_variables)
    for rows in (34, 24, 9):
        dataset = tf.data.Dataset.from_tensor_slices(dense_data(rows)).batch(12)
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    of_windows = min(steps, 2)  # one adds, and one adds and updates
    assert model.traces == of_windows
    for size in (4, 5, 4, None):  # a new size is traced once, and so is none: no window is full
        model.microbatch_size = size
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert model.traces == of_windows + 2


# Settings.


class Net(AccumulatingModel, keras.Sequential):
    pass


def test_both_settings_are_compile_arguments_attributes_and_saved(tmp_path):
    model = Net([keras.Input((4,)), keras.layers.Dense(2)])
    assert model.microbatch_size is None
    model.compile("sgd", "mse", accumulation_steps=3, microbatch_size=5)
    assert (model.accumulation_steps, model.microbatch_size) == (3, 5)
    model.compile("sgd", "mse")
    assert model.microbatch_size == 5
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Net": Net})
    assert (loaded.accumulation_steps, loaded.microbatch_size) == (3, 5)
    loaded.microbatch_size = np.int64(7)
    assert loaded.microbatch_size == 7
    loaded.microbatch_size = None
    assert loaded.microbatch_size is None


def test_a_wrapped_models_compile_config_is_the_plain_models():
    configs = []
    for wrap in (False, True):
        model = accumulate(dense_model(), microbatch_size=5) if wrap else dense_model()
        model.compile(keras.optimizers.Adam(name="adam"), "mse")
        configs.append(model.get_compile_config())
    assert configs[0] == configs[1]


# Half precision.


@pytest.mark.parametrize("power", [14, 17, 20])
def test_one_finite_check_per_batch_in_float16(power):
    set_dtype("mixed_float16")
    x, y = dense_data(64)
    trained = []
    for size in (None, 5):
        model = accumulate(seeded(dense_model), microbatch_size=size)
        inner = keras.optimizers.SGD(0.1)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**power), "mse")
        model.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0)
        trained.append(model)
    whole, split = (
        (num_updates(m.optimizer), float(m.optimizer.dynamic_scale.numpy())) for m in trained
    )
    # The full batch adds its rows up in float16, and may overflow where float32 sums do not.
    assert split[0] in (whole[0], whole[0] + 1)
    assert split[1] == 2.0 ** (power - (8 - split[0]))


def test_several_optimizers_each_get_their_own_sum(float64):
    x, y = dense_data(33)
    trained, logs = [], []
    for size in (5, None):
        model = accumulate(seeded(TwoOptimizers), microbatch_size=size)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9))
        start = model.get_weights()
        history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
        logs.append(history.history)
    assert relative_difference(*trained, start) <= TOLERANCE[float64]
    for name, values in logs[0].items():
        np.testing.assert_allclose(values, logs[1][name], rtol=1e-12)


def test_a_batch_in_which_nothing_counts_changes_nothing():
    """Where the loss of its microbatches is 0 / 0."""

    def masked_mean(y, outputs):
        mask = tf.cast(y >= 0, outputs.dtype)
        return tf.reduce_sum(mask * tf.square(outputs - y)) / tf.reduce_sum(mask)

    model = accumulate(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
        microbatch_size=4,
        loss_over="microbatch",
    )
    model.compile("sgd", masked_mean)
    before = model.get_weights()
    x = np.ones((12, 4), "float32")
    model.train_on_batch(x, np.full((12, 1), -1.0))
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    model.train_on_batch(x, np.full((12, 1), 1.0))
    assert np.any(model.get_weights()[0] != before[0])


@pytest.mark.gate
def test_a_gradient_is_freed_as_soon_as_it_is_added():
    """Peak memory of a model whose weights take nearly all of it, in processes of their own."""
    plain, split = (
        in_own_process(way, _bench.measure_memory, "dense", False, way, 16)
        for way in (_bench.REFERENCE, _bench.SIZE)
    )
    # The sums take one size of the weights, and some of that is free before they are there.
    assert split.size < plain.size + 0.85 * plain.trainable_size
