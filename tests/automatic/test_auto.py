"""`microbatch_size="auto"`: the largest size that fits, and what happens where one fails later.

What fits is decided by a layer, by the number of rows. Where more come, it fails as an allocation
does: in a graph a `MemoryError` in a `tf.numpy_function` becomes a `ResourceExhaustedError`. A real
allocation that fails takes ten seconds, because TensorFlow waits for memory to be freed.
"""

import functools
import pathlib
import random
import re
import sys
import types
import warnings

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from helpers import (
    TOLERANCE,
    assert_changed,
    dense_data,
    relative_difference,
    scope,
    seeded,
    text_of,
    told,
)

from ga_model import AccumulatingModel, accumulate
from ga_model.automatic import _budget
from ga_model.automatic._auto import AutomaticSize
from ga_model.automatic._search import FoundSize
from ga_model.replicas import _strategy
from ga_model.tools import _memory

EXHAUSTED = tf.errors.ResourceExhaustedError


class Memory:
    """Memory of so many rows.

    Attributes:
        limit: rows that fit.
        taken: rows of every microbatch that came, also of those that failed.
        drops: limits that hold from a number of microbatches on.
    """

    __slots__ = ("drops", "limit", "taken")  # in no `__dict__`, which a search would put back

    def __init__(self, limit=10**6):
        self.limit, self.taken, self.drops = limit, [], {}

    def take(self, rows):
        self.limit = self.drops.pop(len(self.taken), self.limit)
        self.taken.append(int(rows))
        if rows > self.limit:
            raise MemoryError("no memory for so many rows")
        return np.int32(rows)

    def drop_in(self, microbatches, limit):
        """Let less fit from the microbatch on that comes after so many others."""
        self.drops[len(self.taken) + microbatches] = limit


class Limited(keras.layers.Layer):
    """Hands on what it gets, if it fits."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def call(self, x):
        rows = tf.shape(x)[0]
        if isinstance(x, keras.KerasTensor):
            return x
        if not tf.executing_eagerly():
            rows = tf.numpy_function(self.memory.take, [rows], tf.int32)
            rows.set_shape(())
        else:
            try:
                self.memory.take(int(rows))
            except MemoryError as error:
                raise EXHAUSTED(None, None, str(error)) from None
        return x + tf.cast(0 * rows, x.dtype)

    def compute_output_shape(self, shape):
        return shape


class Counting(keras.layers.Layer):
    """Counts its calls in training, in a variable of Keras and in one of TensorFlow."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.calls_in_tensorflow = tf.Variable(0.0, trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
            self.calls_in_tensorflow.assign_add(1.0)
        return x * (1.0 + 0.01 * tf.cast(self.calls, x.dtype))


class Looking(keras.layers.Layer):
    """Adds entries of a table, whose gradient has rows."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(200, 4)

    def build(self, shape):
        self.table.build(shape)

    def call(self, x):
        return x + keras.ops.mean(self.table(keras.ops.cast(x > 0.0, "int32")), axis=1)


def smooth_model(memory):
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, activation="tanh"),
            Limited(memory),
            keras.layers.Dense(2),
        ]
    )


def model_with_state(memory):
    return keras.Sequential(
        [
            keras.Input((4,)),
            Looking(),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.BatchNormalization(),
            Counting(),
            keras.layers.Dropout(0.3),
            Limited(memory),
            keras.layers.Dense(2),
        ]
    )


def compiled(make, memory, size="auto", *, optimizer="adam", replicas=None, **settings):
    names = ("accumulation_steps", "skip_nonfinite", "loss_over")
    own = {name: settings.pop(name) for name in names if name in settings}
    if make is model_with_state:  # which on the full batch would run whole
        own.setdefault("loss_over", "microbatch")
    with warnings.catch_warnings(), scope(replicas):
        warnings.filterwarnings("ignore", "BatchNormalization layers in training mode")
        model = accumulate(seeded(lambda: make(memory)), microbatch_size=size, **own)
        metrics = None if make is TwoOptimizers else ["mae"]  # which its step would leave unbuilt
        model.compile(optimizer, "mse", metrics=metrics, **settings)
    return model


def state(model):
    """Return all that a step changes, by name."""
    groups = {
        "model": model.variables,
        "optimizer": model.optimizer.variables,
        "metrics": model.metrics_variables,
    }
    values = {
        f"{group} {i} {re.sub('_[0-9]+$', '', v.name) if group == 'model' else ''}": v.numpy()
        for group, variables in groups.items()
        for i, v in enumerate(variables)
    }
    counting = [layer for layer in model.layers if isinstance(layer, Counting)]
    if counting:
        values["raw"] = counting[0].calls_in_tensorflow.numpy()
    return values


def assert_same(values, expected, rtol=0):
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=rtol, atol=rtol, err_msg=name)


def fit(model, data, rows=12, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "BatchNormalization layers in training mode")
        warnings.filterwarnings("ignore", "`train_step` of .* writes to .*(counting|Variable)")
        kwargs = {"verbose": 0, **kwargs}
        return model.fit(*data, batch_size=rows, shuffle=False, **kwargs).history


# The search.


@pytest.mark.parametrize("limit", [17, 1, 3, 100, 1000])
def test_the_largest_size_that_fits_is_found(limit, capsys):
    model = compiled(smooth_model, memory := Memory(limit))
    assert model.microbatch_size == "auto"
    fit(model, dense_data(256), rows=128, epochs=2, verbose=2)
    size = min(limit, 128)
    assert model.microbatch_size == size
    assert max(memory.taken) <= 2 * limit
    tells = f"({limit + 1} did not fit)"
    said = {
        1: f"1 sample per microbatch {tells}",
        1000: "the full batch of 128 samples fits",
    }.get(limit, f"{size} samples per microbatch {tells}")
    assert f'microbatch_size="auto": {said}\n' in capsys.readouterr().out


@pytest.mark.gate
def test_the_search_shows_what_it_tries_where_keras_shows_its_progress(capsys, monkeypatch):
    data = dense_data(16)
    fit(compiled(smooth_model, Memory(3)), data, rows=16)
    assert capsys.readouterr().out == ""
    fit(compiled(smooth_model, Memory(3)), data, rows=16, verbose=2)
    assert [line for line in capsys.readouterr().out.splitlines() if "auto" in line] == [
        'microbatch_size="auto": 3 samples per microbatch (4 did not fit)'
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    fit(compiled(smooth_model, Memory(3)), data, rows=16, verbose=2)
    lines = capsys.readouterr().out.split("\n")[0].split("\r")
    assert [re.findall(r"\d+", line)[:1] for line in lines if "trying" in line] == [
        ["1"],
        ["2"],
        ["4"],
        ["3"],
    ]
    assert 'microbatch_size="auto": trying 4 samples per microbatch ...' in "".join(lines)
    assert "3 samples per microbatch" in lines[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"run_eagerly": True},
        {"accumulation_steps": 2},
        {"skip_nonfinite": True},
        {"run_eagerly": True, "accumulation_steps": 2, "skip_nonfinite": True},
    ],
)
def test_it_is_found_with_other_settings(settings):
    model = compiled(smooth_model, Memory(5), **settings)
    fit(model, dense_data(24), rows=12)
    assert model.microbatch_size == 5


@pytest.mark.parametrize("eager", [False, True])
def test_the_search_leaves_everything_as_it_was(eager):
    model = compiled(model_with_state, memory := Memory(), size=4, run_eagerly=eager)
    fit(model, dense_data(24))
    before, taken = state(model), len(memory.taken)
    counted = [name for name in before if "count" in name or "seed" in name or "moving" in name]
    assert all(np.any(before[name]) for name in counted)
    assert len(counted) == 3
    memory.limit = 5
    model.microbatch_size = "auto"
    model._accumulation.automatic_size._search(model, tuple(map(tf.constant, dense_data(12))), 12)
    assert len(memory.taken) > taken + 4
    assert model.microbatch_size == 5
    after = state(model)
    if eager:  # where nothing tells of variables that are not Keras's
        before.pop("raw"), after.pop("raw")
    assert_same(after, before)


class DrawsInPython(keras.layers.Layer):
    def call(self, x):
        return x * (1.0 + 0.1 * np.random.rand() + 0.1 * random.random())


@pytest.mark.gate
@pytest.mark.parametrize("eager", [False, True])
def test_the_search_leaves_the_random_state_of_python_and_numpy(eager):
    """Eagerly every trial draws, and in a graph every trace."""

    def make(memory):
        return keras.Sequential([smooth_model(memory), DrawsInPython()])

    model = compiled(make, Memory(5), run_eagerly=eager)
    model.optimizer.build(model.trainable_variables)
    fit(model, dense_data(12))
    before = random.getstate(), np.random.get_state()[1].tolist()
    model._accumulation.automatic_size._search(model, tuple(map(tf.constant, dense_data(12))), 12)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert model.microbatch_size == 5


class Teaching(keras.Model):
    """A frozen layer follows the one that is trained, and the learning rate decays by itself."""

    def __init__(self, memory):
        super().__init__()
        self.student = keras.layers.Dense(2)
        self.teacher = keras.layers.Dense(2, trainable=False)
        self.limited = Limited(memory)

    def build(self, shape):
        self.student.build(shape)
        self.teacher.build(shape)

    def call(self, x):
        return self.student(self.limited(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        kernel = self.teacher.kernel
        kernel.assign(0.9 * kernel + 0.1 * self.student.kernel)
        return keras.ops.mean((y_pred - self.teacher(x)) ** 2)

    def train_step(self, data):
        rate = self.optimizer.learning_rate
        rate.assign(0.9 * rate)
        return super().train_step(data)


class TeachingOverTheBatch(Teaching):
    train_step = keras.Model.train_step


@pytest.mark.filterwarnings("ignore:.*writes to .*teaching")
@pytest.mark.filterwarnings("ignore:What a custom loss averages over")  # eagerly
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("make", "loss_over"), [(Teaching, "microbatch"), (TeachingOverTheBatch, "batch")]
)
def test_the_search_undoes_what_steps_change_of_frozen_weights(make, loss_over, eager, float64):
    """And so does a batch that is repeated, in the middle of it."""
    models = []
    for size in ("auto", 4):
        settings = {"loss_over": loss_over, "run_eagerly": eager, "optimizer": "sgd"}
        model = compiled(make, memory := Memory(4), size, **settings)
        model.build((None, 4))
        model.optimizer.build(model.trainable_variables)
        data = dense_data(12)
        model.train_on_batch(*data)
        if size == "auto":
            memory.drop_in(1 if loss_over == "microbatch" else 4, 2)
            with pytest.warns(UserWarning, match="retried with 2"):
                model.train_on_batch(*data)
        else:
            model.microbatch_size = 2
            model.train_on_batch(*data)
        models.append(model)
    assert_same(state(models[0]), state(models[1]), rtol=1e-12)


class DropoutCell(keras.layers.SimpleRNNCell):
    def __init__(self):
        super().__init__(3)
        self.drop = keras.layers.Dropout(0.3)

    def call(self, inputs, states, training=False):
        output, states = super().call(inputs, states)
        return self.drop(output, training=training), states


class TracedBefore(keras.Model):
    """Draws in a function of its own, and in the loop of a layer that is used twice."""

    def __init__(self, memory):
        super().__init__()
        self.limited, self.drop = Limited(memory), keras.layers.Dropout(0.3)
        self.recurrent = keras.layers.RNN(DropoutCell())
        self.dense = keras.layers.Dense(2)
        self(np.ones((1, 4), "float32"), training=True)

    @tf.function(reduce_retracing=True)
    def dropped(self, x, training):
        return self.drop(x, training=training)

    def call(self, x, training=False):
        x = self.dropped(self.limited(x), training)[..., None]
        return self.dense(self.recurrent(x, training=training) + self.recurrent(2.0 * x))


@pytest.mark.sweep
def test_the_search_undoes_what_inner_graphs_draw():
    model = compiled(TracedBefore, memory := Memory(), size=4)
    fit(model, dense_data(24))
    before, taken = state(model), len(memory.taken)
    memory.limit = 5
    model.microbatch_size = "auto"
    model._accumulation.automatic_size._search(model, tuple(map(tf.constant, dense_data(12))), 12)
    assert len(memory.taken) > taken + 4
    assert model.microbatch_size == 5
    assert_same(state(model), before)
    memory.drop_in(1, 3)
    with pytest.warns(UserWarning, match="retried with 3"):
        model.train_on_batch(*dense_data(12))
    expected = compiled(TracedBefore, Memory(), size=4)
    fit(expected, dense_data(24))
    expected.microbatch_size = 3
    expected.train_on_batch(*dense_data(12))
    assert_same(state(model), state(expected), rtol=1e-6)


class Lazy(keras.Model):
    """Is built by its first batch."""

    def __init__(self, memory):
        super().__init__()
        self.parts = [
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dropout(0.3),
            Limited(memory),
            keras.layers.Dense(2),
        ]

    def call(self, x, training=False):
        for part in self.parts:
            x = part(x, training=training) if isinstance(part, keras.layers.Dropout) else part(x)
        return x


class TwoOptimizers(Lazy):
    """Has a `train_step` of its own, with an optimizer that nothing builds before it."""

    def __init__(self, memory):
        super().__init__(memory)
        self.other_optimizer = keras.optimizers.Adam(0.1)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            difference = self(x, training=True) - y
            loss, other = tf.reduce_mean(difference**2), tf.reduce_mean(tf.abs(difference))
        first, last = self.parts[0].trainable_variables, self.parts[-1].trainable_variables
        self.optimizer.apply(tape.gradient(loss, first), first)
        self.other_optimizer.apply(tape.gradient(other, last), last)
        return {"loss": loss, "other": other}


@pytest.mark.gate
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (model_with_state, {}),
        (Lazy, {"accumulation_steps": 3}),
        (TwoOptimizers, {}),
        (TwoOptimizers, {"run_eagerly": True}),
    ],
)
def test_training_is_that_with_the_size_as_a_number(make, settings):
    data = dense_data(66)  # the last batch has 6 rows
    model, expected = (compiled(make, Memory(5), size, **settings) for size in ("auto", 5))
    logs, expected_logs = fit(model, data, epochs=2), fit(expected, data, epochs=2)
    assert model.microbatch_size == 5
    assert_same(state(model), state(expected))
    assert logs == expected_logs


@pytest.mark.gate
def test_losses_of_outputs_are_logged_as_with_the_size_as_a_number():
    """Keras weights them by a number of samples that shapes tell, and here they do not."""
    x, y = dense_data(30)
    logs = []
    for size in ("auto", 20):
        inputs = keras.Input((4,))
        outputs = [
            keras.layers.Dense(2, kernel_initializer="ones", name=name)(inputs) for name in "ab"
        ]
        model = accumulate(keras.Model(inputs, outputs), microbatch_size=size)
        model.compile("sgd", ["mse", "mae"])
        history = model.fit(x, [y, y], batch_size=20, shuffle=False, verbose=0).history
        logs.append({name: loss for name, (loss,) in history.items()})
    assert logs[0] == pytest.approx(logs[1])


class Rows(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 5

    def __getitem__(self, index):
        part = slice(12 * index, 12 * index + 12)
        return {"x": self.x[part]}, self.y[part]


@pytest.mark.gate
def test_any_kind_of_data_is_taken():
    x, y = dense_data(54)

    def make(memory):
        inputs = {"x": keras.Input((4,), name="x")}
        return keras.Model(inputs, smooth_model(memory)(inputs["x"]))

    def batches():
        for index in range(5):
            yield {"x": x[12 * index :][:12]}, y[12 * index :][:12]

    def on_batches(model):
        for batch in batches():
            model.train_on_batch(*batch)

    dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(12)
    ways = [
        lambda model: model.fit(Rows(x, y), shuffle=False, verbose=0),
        lambda model: model.fit(batches(), shuffle=False, verbose=0, steps_per_epoch=5),
        lambda model: model.fit(dataset, shuffle=False, verbose=0),
        on_batches,
    ]
    expected = compiled(make, Memory(), 5)
    fit(expected, ({"x": x}, y))
    for way in ways:
        model = compiled(make, Memory(5))
        way(model)
        assert model.microbatch_size == 5
        assert model.optimizer.iterations == 5
        for weight, w in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_array_equal(weight, w)


@pytest.mark.gate
@pytest.mark.parametrize("steps", [4, 9])
def test_executions_of_several_steps_end_with_the_data(steps):
    data = dense_data(66)
    model, expected = (
        compiled(smooth_model, Memory(5), size, steps_per_execution=steps) for size in ("auto", 5)
    )
    logs, expected_logs = fit(model, data, epochs=2), fit(expected, data, epochs=2)
    assert model.optimizer.iterations == 12
    assert logs == expected_logs
    assert_same(state(model), state(expected))


def test_a_search_is_one_trace():
    class Counted(AccumulatingModel, keras.Sequential):
        traces = 0

        def compute_loss(self, *args, **kwargs):
            Counted.traces += 1
            return super().compute_loss(*args, **kwargs)

    model = compiled(lambda memory: Counted(smooth_model(memory).layers), Memory(17), size=4)
    fit(model, dense_data(256), rows=128)  # builds everything
    before, model.microbatch_size = Counted.traces, "auto"
    fit(model, dense_data(256), rows=128)
    assert model.microbatch_size == 17
    assert Counted.traces == before + 2  # one of the search, one to train


@pytest.mark.gate
def test_a_larger_batch_is_searched_again_only_where_the_batch_was_the_limit(monkeypatch):
    x, y, searched, search = *dense_data(60), [], AutomaticSize._search
    monkeypatch.setattr(
        AutomaticSize, "_search", lambda *args: (searched.append(1), search(*args))[1]
    )
    model = compiled(smooth_model, memory := Memory(20))
    for rows, size in [(6, 6), (4, 6), (12, 12), (40, 20), (60, 20)]:
        model.train_on_batch(x[:rows], y[:rows])
        assert model.microbatch_size == size
    assert len(searched) == 3
    memory.limit = 30
    model.microbatch_size = "auto"
    assert model.microbatch_size == "auto"
    model.train_on_batch(x, y)
    assert model.microbatch_size == 30
    model.compile("adam", "mse")
    assert model.microbatch_size == "auto"
    model.microbatch_size = None
    model.train_on_batch(x[:30], y[:30])
    assert model.microbatch_size is None
    assert len(searched) == 4


@pytest.mark.gate
def test_a_saved_model_searches_anew(tmp_path):
    class Net(AccumulatingModel, keras.Sequential):
        pass

    model = Net([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse", microbatch_size="auto")
    fit(model, dense_data(12))
    assert model.microbatch_size == 12
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Net": Net})
    assert loaded.microbatch_size == "auto"
    fit(loaded, dense_data(12))
    assert loaded.microbatch_size == 12


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore:.*writes to .*counting")
def test_batch_normalization_is_told_of_only_where_batches_are_split():
    def make(limit):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return compiled(model_with_state, Memory(limit))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(12).fit(*dense_data(12), batch_size=12, verbose=0)
    with pytest.warns(UserWarning, match="BatchNormalization layers in training mode"):
        make(5).fit(*dense_data(12), batch_size=12, verbose=0)


# Memory that is used up later.


@pytest.mark.gate
@pytest.mark.parametrize(
    ("steps", "microbatches", "limit", "sizes", "eager"),
    [
        (3, 5, 3, [4, 2], False),
        (3, 5, 2, [4, 2], True),
        pytest.param(1, 1, 3, [4, 2], False, marks=pytest.mark.sweep),
        pytest.param(1, 7, 2, [4, 2], False, marks=pytest.mark.sweep),
        pytest.param(1, 7, 2, [4, 2], True, marks=pytest.mark.sweep),
    ],
)
def test_a_repeated_batch_loses_no_row(steps, microbatches, limit, sizes, eager, float64):
    """The limit drops in the middle of a batch, in windows of 3 of the third, where two wait."""
    data = dense_data(84)
    reference = compiled(smooth_model, Memory(), size=None)
    model = compiled(smooth_model, memory := Memory(8), accumulation_steps=steps, run_eagerly=eager)
    model.optimizer.build(model.trainable_variables)
    start = model.get_weights()
    model.train_on_batch(*(part[:12] for part in data))  # finds the size
    assert model.microbatch_size == 8
    model.close_window()
    reference.train_on_batch(*(part[:12] for part in data))
    rest = [part[12:] for part in data]
    fit(reference, rest, rows=12 * steps)
    memory.drop_in(microbatches, limit)

    with pytest.warns(UserWarning, match="no longer fits in memory") as caught:
        fit(model, rest, rows=12)
    said = told(caught)
    assert [int(text.split("retried with ")[1].split(",")[0]) for text in said] == sizes
    assert model.microbatch_size == sizes[-1]
    assert model.optimizer.iterations == reference.optimizer.iterations
    assert_changed(reference.get_weights(), start)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE["float64"]


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.sweep), 3])
def test_a_repeated_batch_leaves_no_trace_in_what_steps_change(steps, float64):
    """Running statistics, counters and random state are those of a run that knew it before."""
    data = dense_data(66)

    class Sizes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.microbatch_size = 8 if batch < 4 else 4

    def make(size):
        return compiled(
            model_with_state, Memory(8), size, accumulation_steps=steps, skip_nonfinite=False
        )

    expected = make(8)
    expected_logs = fit(expected, data, callbacks=[Sizes()])
    model = make("auto")
    memory = next(layer for layer in model.layers if isinstance(layer, Limited)).memory

    class Drop(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4:
                memory.drop_in(1, 3)  # 8 rows went through, and these 4 do not
                memory.drop_in(2, 4)

    with pytest.warns(UserWarning, match="no longer fits in memory"):
        logs = fit(model, data, callbacks=[Drop()])
    assert model.microbatch_size == 4
    assert_same(state(model), state(expected), rtol=1e-12)
    assert_same(logs, expected_logs, rtol=1e-12)


@pytest.mark.gate
def test_a_loss_over_the_batch_gets_a_size_and_a_smaller_one(float64):
    """In the first pass, and in the second, when outputs and losses are there already."""

    def compares_rows(y, y_pred):
        nearest = tf.math.top_k(-tf.abs(y_pred[:, :1] - y_pred[:, 0]), 5)[0]  # needs five rows
        pairs = tf.reduce_mean(tf.square(y_pred[:, None] - y[None]) * y_pred[None], 2)
        return tf.reduce_mean(pairs, 1) - tf.reduce_mean(nearest, 1)

    data = dense_data(32)
    expected = seeded(lambda: smooth_model(Memory()))
    expected.compile("sgd", compares_rows)
    start = expected.get_weights()
    fit(expected, data, rows=16)
    for drop in (1, 5):  # of eight calls with four rows
        model = compiled(smooth_model, memory := Memory(4), optimizer="sgd", loss_over="batch")
        model.compile("sgd", compares_rows)
        model.train_on_batch(*[part[:16] for part in data])
        assert model.microbatch_size == 4
        assert memory.taken[-8:] == 8 * [4]
        memory.drop_in(drop, 2)
        with pytest.warns(UserWarning, match="retried with 2"):
            model.train_on_batch(*[part[16:] for part in data])
        assert (
            relative_difference(model.get_weights(), expected.get_weights(), start)
            < (TOLERANCE[float64])
        )


class Adversaries(keras.Model):
    """Updates one network before it takes the other's gradient, and applies an optimizer twice."""

    def __init__(self, memory):
        super().__init__()
        self.makes, self.judges = smooth_model(memory), smooth_model(Memory())

    def train_step(self, data):
        x, y = data[:2]
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.sqrt(tf.reduce_mean((self.judges(x) - self.makes(x)) ** 2))
            weights = self.judges.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = tf.sqrt(tf.reduce_mean((self.judges(x) * self.makes(x) - y) ** 2))
        weights = self.makes.trainable_variables
        self.other_optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.sweep
@pytest.mark.parametrize("way", [{"run_eagerly": True}, {}], ids=str)
def test_a_step_that_applies_optimizers_in_turn_gets_a_size(way, float64):
    """And no second chance: nobody knows what it has updated."""
    data = dense_data(32)
    models = []
    for size in ("auto", None):
        memory = Memory(4 if size else 100)
        make = functools.partial(Adversaries, memory)
        model = accumulate(seeded(make), microbatch_size=size)
        model.other_optimizer = keras.optimizers.SGD(0.1)
        model.compile("adam", **way)
        models.append(model)
        for part in (slice(0, 16), slice(16, 32)):
            model.train_on_batch(*[values[part] for values in data])
    assert models[0].microbatch_size == 4
    start = seeded(lambda: Adversaries(Memory())).get_weights()
    weights = [model.get_weights() for model in models]
    assert relative_difference(*weights, start) < TOLERANCE[float64]
    models[0].makes.layers[1].memory.drop_in(0, 2)
    with pytest.raises(RuntimeError, match="retried only if its update has not begun"):
        models[0].train_on_batch(*data)


def test_a_size_that_does_not_fit_any_more_is_halved():
    found, model = FoundSize(), types.SimpleNamespace(name="net")
    for size, rows, half in ((11, 12, 6), (6, 12, 3), (3, 3, 2), (8, 5, 3), (2, 12, 1)):
        found.size = size
        with pytest.warns(UserWarning, match=rf"is\s+retried with {half}\b"):
            found.halve(model, rows, MemoryError())
        assert found.size == half
    with pytest.raises(RuntimeError, match="one sample"):
        found.halve(model, 12, MemoryError())


@pytest.mark.gate
def test_the_last_row_that_does_not_fit_is_an_error():
    data = dense_data(24)
    model = compiled(smooth_model, memory := Memory(0))
    before = state(model)
    with pytest.raises(RuntimeError, match=r"at least one sample must fit.* Received: ") as caught:
        fit(model, data)
    assert "no memory for so many rows" in text_of(caught.value)
    assert model.microbatch_size == "auto"
    after = state(model)
    assert_same({name: after[name] for name in before}, before)
    memory.limit = 2
    fit(model, data)
    weights = model.get_weights()
    memory.limit = 0
    with (
        pytest.warns(UserWarning, match="no longer fits") as said,
        pytest.raises(RuntimeError) as caught,
    ):
        model.train_on_batch(*data)
    assert [text.count("at a time") for text in told(said)] == [1]  # from 2 rows to 1
    assert "at least one sample must fit" in str(caught.value)
    assert isinstance(caught.value.__cause__, EXHAUSTED)
    for weight, w in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(weight, w)


class Allocating(keras.layers.Layer):
    """Needs more memory than any machine has, where there are more rows than fit."""

    def __init__(self, memory):
        super().__init__()
        self.limit = memory.limit

    def call(self, x):
        if self.limit is None or isinstance(x, keras.KerasTensor):
            return x
        side = tf.where(tf.shape(x)[0] > self.limit, 2**20, 1)
        matrix = tf.random.stateless_uniform([side, side], [1, 2])
        return x + 1e-9 * tf.linalg.matmul(matrix, matrix)[0, 0]

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.gate
@pytest.mark.parametrize("settings", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_an_allocation_that_fails_is_found(settings):
    def make(memory):
        layers = smooth_model(memory).layers
        return keras.Sequential([keras.Input((4,)), layers[0], Allocating(memory), layers[-1]])

    model = compiled(make, Memory(3), **settings)
    fit(model, dense_data(8), rows=8)
    assert model.microbatch_size == 3


@pytest.mark.gate
def test_under_xla_a_batch_is_not_repeated(monkeypatch):
    """TensorFlow leaves variables with freed memory there."""
    model = accumulate(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    model.compile("sgd", "mse", jit_compile=True, microbatch_size="auto")

    def exhausted(iterator):
        raise EXHAUSTED(None, None, "no memory for so many rows")

    monkeypatch.setattr(model, "_make_function_of_keras", lambda: exhausted)
    with pytest.raises(
        RuntimeError, match=r"XLA.*out of memory with 12 samples.*number, such as 6"
    ) as caught:
        fit(model, dense_data(12))
    assert isinstance(caught.value.__cause__, EXHAUSTED) or "no memory" in text_of(caught.value)


class Exhausting(keras.optimizers.SGD):
    """Runs out of memory when it is applied, if it is told to."""

    memory = None

    def apply(self, grads, trainable_variables=None):
        first, *rest = grads
        one = tf.numpy_function(self.memory.take, [1], tf.int32)
        one.set_shape(())
        grads = [first + tf.cast(0 * one, first.dtype), *rest]
        return super().apply(grads, trainable_variables)


@pytest.mark.gate
@pytest.mark.parametrize("steps", [1, 2])
def test_an_update_that_failed_is_not_repeated(steps):
    optimizer, data = Exhausting(0.1), dense_data(48)
    optimizer.memory = Memory()
    model = compiled(smooth_model, Memory(5), optimizer=optimizer, accumulation_steps=steps)
    fit(model, data)
    for _ in range(steps - 1):
        model.train_on_batch(*data)
    optimizer.memory.drop_in(0, 0)
    with pytest.raises(RuntimeError, match=r"in the update with 5 samples.*such as 2\.") as caught:
        model.train_on_batch(*data)
    assert isinstance(caught.value.__cause__, EXHAUSTED)
    assert "no memory for so many rows" in text_of(caught.value)
    assert model.has_updated  # nothing waits


@pytest.mark.gate
def test_an_update_that_failed_is_not_repeated_after_another_search():
    """The function that is used was traced before it."""
    x, y = dense_data(12)
    optimizer = Exhausting(0.1)
    optimizer.memory = Memory()
    model = compiled(smooth_model, memory := Memory(12), optimizer=optimizer)
    model.train_on_batch(x[:6], y[:6])
    model.train_on_batch(x, y)
    assert model.microbatch_size == 12
    memory.limit = 6
    with pytest.warns(UserWarning, match="retried with 6"):
        model.train_on_batch(x, y)
    optimizer.memory.drop_in(0, 0)
    with pytest.raises(RuntimeError, match="in the update with 6 samples"):
        model.train_on_batch(x[:6], y[:6])


@pytest.mark.gate
def test_setting_it_again_traces_nothing_again_but_the_search():
    model = compiled(smooth_model, Memory(5), size="auto")
    counts = []
    for _ in range(3):
        model.train_on_batch(*dense_data(12))
        counts.append(model._accumulation.automatic_size)
        model.microbatch_size = "auto"
        assert model.microbatch_size == "auto"
    assert counts[0] is counts[1] is counts[2]


@pytest.mark.sweep
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_replicas_have_one_size(replicas):
    data = dense_data(24)
    model = compiled(smooth_model, memory := Memory(3), replicas=replicas)
    fit(model, data, rows=24)
    assert model.microbatch_size == 3
    expected = compiled(smooth_model, Memory(), 3, replicas=replicas)
    fit(expected, data, rows=24)
    for weight, w in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, w)
    memory.drop_in(3, 2)
    with pytest.warns(UserWarning, match="retried with 2"):
        fit(model, data, rows=24)
    expected.microbatch_size = 2
    fit(expected, data, rows=24)
    for weight, w in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, w, rtol=1e-6)


# Measured memory.


@pytest.mark.parametrize("size", [1, 2, 3, 17, 100])
def test_a_size_that_would_take_too_much_is_not_tried(size, monkeypatch, capsys):
    """Here the sums of the gradients take 176 bytes, of 44 numbers, and every row takes 10."""
    memory = Memory()
    monkeypatch.setattr(_memory, "reset_peak_memory", lambda: None)
    monkeypatch.setattr(_memory, "resident_memory", lambda: 5000)
    monkeypatch.setattr(_memory, "held_memory", lambda: 0)
    monkeypatch.setattr(_memory, "peak_memory", lambda: 5176 + 10 * (memory.taken or [0])[-1])
    available = (176 + 10 * size + 5) / (1 - _budget._MARGIN)
    monkeypatch.setattr(_memory, "available_memory", lambda: available)
    model = compiled(smooth_model, memory)
    fit(model, dense_data(256), rows=256, verbose=2)
    assert model.microbatch_size == size
    assert max(memory.taken) == size
    assert f"({size + 1} would not fit)" in capsys.readouterr().out


def test_memory_that_the_process_still_holds_does_not_hide_what_rows_take(monkeypatch):
    """The sums take 176 bytes and a row takes 10; 700 were freed before, and are taken first."""
    budget = _budget.Budget(is_on_cpu=True, least=176)
    rise = 0
    monkeypatch.setattr(_memory, "reset_peak_memory", lambda: None)
    monkeypatch.setattr(_memory, "resident_memory", lambda: 5000)
    monkeypatch.setattr(_memory, "peak_memory", lambda: 5000 + rise)
    monkeypatch.setattr(_memory, "held_memory", lambda: 700)
    monkeypatch.setattr(_memory, "available_memory", lambda: 700 / (1 - _budget._MARGIN))
    budget.has_begun = True
    fitting = []
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        rise = max(0, 176 + 10 * size - 700)
        if not budget.allows(size):
            break
        with budget.measuring(size):
            pass
        assert budget.allowed(size)
        fitting.append(size)
    assert fitting[-1] == 64  # 128 rows would take 1456, and there are 1400
    assert budget.allows(65)
    rise = 701  # more than was foreseen
    with budget.measuring(65):
        pass
    assert not budget.allowed(65)


@pytest.mark.gate
def test_what_rows_take_is_measured(monkeypatch, capsys):
    """A row takes 4 MB and more, and of 256 rows 300 MB are to hold some."""

    class Large(keras.layers.Layer):
        def call(self, x):
            return tf.reduce_sum(tf.tanh(tf.tile(x, (1, 2**18))), axis=1, keepdims=True) * 1e-6

        def compute_output_shape(self, shape):
            return (shape[0], 1)

    def make(memory):
        layers = [keras.layers.Dense(4), Limited(memory), Large(), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((4,)), *layers])

    start = _memory.resident_memory()
    left = lambda: start + 600 * 10**6 - _memory.resident_memory()  # noqa: E731
    monkeypatch.setattr(_memory, "available_memory", left)
    model = compiled(make, memory := Memory())
    fit(model, dense_data(256), rows=256, verbose=2)
    assert 8 <= model.microbatch_size <= 128
    assert max(memory.taken) <= 2 * model.microbatch_size
    assert "would not fit" in capsys.readouterr().out
    assert _memory.peak_memory() - start < 700 * 10**6


def test_a_group_of_processes_may_have_less_memory(tmp_path, monkeypatch):
    (tmp_path / "job").mkdir()
    for folder, limit in ((tmp_path, "max"), (tmp_path / "job", 1000)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 400\ninactive_file 200\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert _memory._left_of_groups(tmp_path, ["job", "gone"], *names) == [500]
    assert 0 < _memory.available_memory() <= psutil.virtual_memory().total

    def read(path, own=pathlib.Path.read_text):
        return "0::/job/gone\n" if str(path) == "/proc/self/cgroup" else own(path)

    monkeypatch.setattr(pathlib.Path, "read_text", read)
    monkeypatch.setitem(_memory._GROUPS, "0", (str(tmp_path), *names))
    assert _memory.available_memory() == 500


def test_workers_can_not_search():
    strategy = object.__new__(tf.distribute.MultiWorkerMirroredStrategy)
    with pytest.raises(NotImplementedError, match=r"All workers must.* Received: .* Set it to a"):
        _strategy.check_can_search(strategy)
