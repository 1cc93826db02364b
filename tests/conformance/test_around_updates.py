"""All that is around an update is that of plain Keras on the full batch, on any backend."""

import copy
import functools
import importlib.util
import itertools
import pickle
import types
import warnings
from pathlib import Path
from unittest import mock

import keras
import losses
import models
import numpy as np
import pytest
import zoo
from case import BACKEND, PRECISION, TRIED, rows_of
from conftest import set_dtype
from helpers import (
    LIMIT,
    ROOT,
    TOLERANCE,
    Batches,
    assert_changed,
    assert_close,
    assert_equal,
    dense_data,
    dense_model,
    files_told,
    parts_of,
    relative_difference,
    ruled,
    run_python,
    seeded,
    sequential,
    state_of,
    told,
    values_of,
)
from keras import layers, ops
from own_train_steps import OfObjective, of
from training import compiled, train

from ga_model import AccumulatingModel, AccumulationScheduler, GradientNoiseScale, accumulate
from ga_model.core.proof import trial
from ga_model.core.proof.runner import StepRunner

if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "torch":
    import torch

WINDOWS, SPLIT, PARTS = {"accumulation_steps": 3}, {"microbatch_size": 5}, {"microbatch_size": 4}


def arguments(**kwargs):
    defaults = {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"]}
    return {**defaults, **kwargs}


def trained(data, rows=None, make=dense_model, compile_args=arguments, **kwargs):
    """Return a model trained through `fit`, and the weights that it began with."""
    return train(make, compile_args, data, rows=rows or rows_of(kwargs), **kwargs)


def weights_after(batches, make, loss="mse", **settings):
    model = compiled(make, loss, **settings)
    for batch in batches:
        model.train_on_batch(*batch)
    return model.get_weights()


# Windows: of one microbatch, closed by hand, interrupted, and changed by a schedule.


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning:keras")
@pytest.mark.parametrize("name", ["dense", "embedding", "masked_recurrent", "unused_variable"])
@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (12, {"accumulation_steps": 1}),
        (12, {"microbatch_size": 12}),
        (12, {"skip_nonfinite": True}),
        (10, {"accumulation_steps": 2}),  # an epoch has one batch
    ],
)
def test_a_window_of_one_microbatch_is_plain_keras_to_the_bit(rows, settings, name):
    make, make_data = zoo.ZOO[name]
    number = 31 if rows == 12 else rows
    data = make_data(number)
    if name != "masked_recurrent":
        data = *data, np.linspace(0.1, 3, 31)[:number]

    # TensorFlow optimizes graphs: it multiplies the constants of a loss first that is not scaled.
    is_scaled = BACKEND == "tensorflow" and (name, rows) == ("masked_recurrent", 10)

    def adam():
        return arguments(optimizer=keras.optimizers.Adam(0.01), run_eagerly=is_scaled)

    reference, _ = trained(data, rows, make, adam)
    found, _ = trained(data, rows, make, adam, **settings)
    assert_equal(found.get_weights(), reference.get_weights())
    assert_equal(values_of(found.optimizer.variables), values_of(reference.optimizer.variables))


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_train_on_batch_and_close_window_match(run_eagerly):
    """Also what it returns: metrics of the window."""
    x, y = dense_data(20)
    reference = compiled(metrics=["mae"])
    start = reference.get_weights()
    model = compiled(metrics=["mae"], run_eagerly=run_eagerly, **WINDOWS)
    model.close_window()  # there is none
    assert model.has_updated
    found = {}
    for end in range(4, 24, 4):
        found[end] = model.train_on_batch(x[end - 4 : end], y[end - 4 : end])
        assert model.has_updated == (end == 12)
    model.close_window()
    model.close_window()
    assert model.has_updated
    for begin, end in ((0, 12), (12, 20)):
        expected = reference.train_on_batch(x[begin:end], y[begin:end])
        np.testing.assert_allclose(found[end], expected, rtol=1e-6)
    assert int(model.optimizer.iterations) == 2
    assert_close(model, reference, start)


def test_a_window_begun_before_a_change_to_1_is_finished():
    x, y = dense_data(20)
    model, reference = compiled(**WINDOWS), compiled()
    start = model.get_weights()
    for i in range(5):
        if i == 1:
            model.accumulation_steps = 1
        model.train_on_batch(x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4])
    for rows in (slice(12), slice(12, 16), slice(16, 20)):
        reference.train_on_batch(x[rows], y[rows])
    assert_close(model, reference, start)
    assert int(model.optimizer.iterations) == 3


def test_evaluate_in_a_callback_leaves_the_window_open():
    x, y = data = dense_data(36)
    evaluates = keras.callbacks.Callback()
    evaluates.on_train_batch_end = lambda batch, logs: evaluates.model.evaluate(x, y, verbose=0)
    model, _ = trained(data, epochs=1, fit_args={"callbacks": [evaluates]}, **WINDOWS)
    assert_close(model, *trained(data, epochs=1))


@pytest.mark.parametrize("how", ["CallbackList", "callback", "tuple", "positional"])
def test_callbacks_are_taken_in_every_form_and_left_as_they_were(how):
    """Of a list that is ready, Keras tells the callbacks of the model once only."""
    x, y = dense_data(28)
    model, epochs, noise = compiled(**WINDOWS), [], GradientNoiseScale()
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    several = [watch, AccumulationScheduler({0: 3}), noise]
    made = keras.callbacks.CallbackList(several, model=model, add_history=True)
    given = {"callback": watch, "tuple": (*several,), "CallbackList": made}.get(how, several)
    before = list(made.callbacks)
    for _ in range(2):
        model.accumulation_steps = 3 if how == "callback" else 1
        if how == "positional":
            model.fit(x, y, 4, 1, 0, given)
        else:
            model.fit(x, y, batch_size=4, verbose=0, callbacks=given)
    assert made.callbacks == before
    assert int(model.optimizer.iterations) == 3 * len(epochs) == 6
    assert bool(noise.noise_scales) == (how != "callback")
    assert not model._accumulation.is_scheduled


def test_a_fit_begins_with_an_empty_window():
    x, y = dense_data(12)
    model = compiled(**WINDOWS)
    model.train_on_batch(100.0 * x[:4], y[:4])
    assert not model.has_updated
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert_close(model, *trained((x, y), epochs=1))


class Decays(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        kernel = self.model.trainable_variables[0]
        kernel.assign(0.9 * kernel)


def trains_with_a_callback(model, x, y):
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[Decays()])


def trains_in_turn(model, x, y):
    other = keras.Sequential([model.layers[0], layers.Dense(2)])  # has a layer of it
    other.compile("sgd", "mse")
    for rows in (slice(first, first + 4) for first in range(0, 24, 4)):
        model.train_on_batch(x[rows], y[rows])
        other.train_on_batch(x[rows], y[rows])


@pytest.mark.every_case
@pytest.mark.parametrize("trains", [trains_with_a_callback, trains_in_turn])
def test_variables_that_something_else_changes_in_an_open_window_are_told_of(trains):
    model = compiled(accumulation_steps=3)
    with pytest.warns(UserWarning, match="Something other than its update changed variables of"):
        trains(model, *dense_data(24))


class Fails(layers.Layer):
    """Raises an error at one of its calls, which are counted where no trial puts them back."""

    calls, fails_at = 0, None

    def call(self, inputs):
        Fails.calls += 1
        if Fails.calls == Fails.fails_at:
            raise KeyboardInterrupt
        return inputs


@pytest.mark.parametrize("settings", [WINDOWS, SPLIT])
def test_an_interrupted_window_is_forgotten(settings):
    """It fails in the second microbatch, when the first is in the sums."""
    x, y = dense_data(12)

    def make():
        return keras.Sequential([dense_model(), Fails()])

    model = compiled(make, run_eagerly=True, **settings)
    start = model.get_weights()
    rows = rows_of(settings)
    model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)  # what is tried, is tried here
    model.set_weights(start)
    Fails.fails_at = Fails.calls + 2
    with pytest.raises(KeyboardInterrupt):
        model.fit(10.0 * x, y, batch_size=rows, shuffle=False, verbose=0)
    assert model.has_updated
    assert_equal(model.get_weights(), start)
    if BACKEND == "torch":
        assert all(v.value.grad is None for v in model.trainable_weights)
    Fails.fails_at = None
    model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    assert_close(model, *trained((x, y), make=make, epochs=1))


class CountsUpdates(AccumulatingModel, keras.Sequential):
    def build(self, shape=None):
        super().build(shape)
        self.updates = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def on_update(self):
        self.updates.assign(self.updates + 1)


class Notes(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.events, self.weights = [], []
        for name in ("train_batch_end", "test_begin", "epoch_end"):
            setattr(self, f"on_{name}", lambda *_, name=name, logs=None: self.events.append(name))

    def on_update_end(self, number, logs=None):
        self.events.append(number)
        self.weights.append(self.model.get_weights())


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("settings", "batches"), [(WINDOWS, (3, 2)), (SPLIT, (1, 1)), ({}, (1, 1))]
)
def test_a_callback_is_told_of_every_update_before_whatever_else_looks(settings, batches):
    """And `on_update` is called once for each. What is seen are the weights of the update."""
    notes, (x, y) = Notes(), dense_data(20)
    model = seeded(losses.of_class(CountsUpdates))
    model.compile(**arguments(), **settings)
    model.fit(x, y, rows_of(settings), 2, 0, [notes], validation_data=(x, y))
    expected = []
    for number, of_window in enumerate(2 * batches, start=1):
        expected += ["train_batch_end"] * of_window
        is_full = of_window == batches[0]  # else the epoch's end closes it
        expected.insert(len(expected) - is_full, number)
        expected += [] if number % 2 else ["test_begin", "epoch_end"]
    assert notes.events == expected
    assert float(model.updates) == 4
    assert_equal(model.get_weights(), notes.weights[-1])
    assert all(np.any(a[0] != b[0]) for a, b in itertools.pairwise(notes.weights))


def test_batches_of_a_window_log_what_it_has_so_far():
    """Where metrics are reset, a batch's log is the window's, with the batches before."""
    x, y = zoo.masked_data(12)  # of which batches have unlike numbers of positions
    model = compiled(zoo.masked_recurrent, **WINDOWS)
    expected = [float(model.test_on_batch(x[:end], y[:end])) for end in (4, 8, 12)]
    found = []
    for end in (4, 8, 12):
        model.reset_metrics()  # up to Keras 3.14, `train_on_batch` does not
        found.append(model.train_on_batch(x[end - 4 : end], y[end - 4 : end]))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# Half precision, and microbatches that are not finite.


def test_half_precision_gradients_are_summed_in_float32():
    """In bfloat16 the sum would end at 512: what comes then is lost one by one."""
    keras.config.set_dtype_policy("bfloat16")
    kernel = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    given = {"optimizer": keras.optimizers.SGD(1 / 1024), "microbatch_size": 1}
    model = compiled(
        lambda: sequential((1,), kernel), keras.losses.MeanSquaredError("sum"), **given
    )
    model.train_on_batch(np.ones((512, 1)), np.ones((512, 1)))
    assert float(model.get_weights()[0].squeeze()) == 1.0


# Settings, microbatches with NaN, reduction, and how it runs: the first microbatches of a window,
# also with all of the next one, all of one window, one of the last.
IN_BOTH, EAGERLY = {**WINDOWS, "microbatch_size": 2}, {"run_eagerly": BACKEND != "jax"}
BY_XLA = {"jit_compile": BACKEND != "torch"}
LEFT_OUT = [
    (IN_BOTH, [0, 1, *range(6, 12)], "sum_over_batch_size", {}),
    (WINDOWS, [1, 5, 7], "mean_with_sample_weight", {}),  # heavier than those before
    (PARTS, [0], "sum", BY_XLA),
    (WINDOWS, [0, 1, 2], "sum_over_batch_size", {}),
    (PARTS, [0, 1, 2], "sum_over_batch_size", {}),
    (WINDOWS, [0], "sum", {}),
    (PARTS, [0], "sum", EAGERLY),
    (WINDOWS, [1], "sum_over_batch_size", BY_XLA),
    (IN_BOTH, [4], "sum_over_batch_size", {}),
]


@pytest.mark.parametrize(("settings", "bad", "reduction", "run"), LEFT_OUT, ids=str)
def test_microbatches_that_are_not_finite_are_left_out(settings, bad, reduction, run):
    """The reference is trained on the rows of the others, and on nothing else."""
    set_dtype(PRECISION)
    rows, (x, y) = rows_of(settings), dense_data(34)
    size = settings.get("microbatch_size", rows)
    is_bad = np.isin(np.arange(34) // size, bad)
    wrong = np.where(is_bad[:, None], np.nan, x)
    base = 2.0 if reduction == "mean_with_sample_weight" else 1.0
    weights = (base ** np.arange(34)).astype(PRECISION)

    def make():  # with a regularizer, which counts once
        head = layers.Dense(2, kernel_regularizer="l2" if reduction == "sum" else None)
        return keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh"), head])

    def compile_args():
        metrics = ["mae", keras.metrics.R2Score()]
        loss = keras.losses.MeanSquaredError(reduction)
        sgd = keras.optimizers.SGD(0.01, weight_decay=0.1)  # also of an update without samples
        return arguments(optimizer=sgd, loss=loss, metrics=metrics)

    model = compiled(make, **compile_args(), **run, skip_nonfinite=True, **settings)
    start, reference = model.get_weights(), compiled(make, **compile_args())
    with pytest.warns(UserWarning, match="were skipped"):
        logs = model.fit(wrong, y, rows, 1, 0, sample_weight=weights, shuffle=False).history
    windows = [part[~is_bad[part]] for part in np.split(np.arange(34), [12, 24])]
    windows = [window for window in windows if len(window)]
    batches = ((x[window], y[window], weights[window]) for window in windows)
    expected = reference.fit(batches, steps_per_epoch=len(windows), shuffle=False, verbose=0)
    assert_close(model, reference, start)
    assert int(model.optimizer.iterations) == len(windows)
    assert model.num_skipped_microbatches == len(bad)
    names = ["mae", "r2_score"]
    if reduction != "sum" or "accumulation_steps" not in settings:
        names.append("loss")
    for name in names:
        values = expected.history[name]
        np.testing.assert_allclose(logs[name], values, rtol=TOLERANCE[PRECISION])


@pytest.mark.parametrize("rows", [4, 12])
def test_what_was_left_out_is_reported_once_and_counted_from_compile_on(rows):
    """And nothing is by default, as in plain Keras."""
    x, y = dense_data(24)
    x[4:12, 0] = np.inf
    settings = {"accumulation_steps": 12 // rows, "microbatch_size": 4}
    model = compiled(skip_nonfinite=True, **settings)
    with pytest.warns(UserWarning, match="NaN or Inf in their gradients") as caught:
        model.fit(x, y, batch_size=rows, epochs=3, shuffle=False, verbose=0)
    assert files_told(caught) == [__file__]
    assert model.num_skipped_microbatches == 6
    model.compile(**arguments())
    assert model.num_skipped_microbatches == 0
    model.skip_nonfinite = False
    model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    assert np.isnan(model.get_weights()[0]).any()
    assert model.num_skipped_microbatches == 0


def test_an_epoch_without_an_update_is_not_said_to_have_few_batches(recwarn):
    x, y = dense_data(10)
    model = compiled(accumulation_steps=3, skip_nonfinite=True)
    model.fit(x + np.nan, y, batch_size=1, verbose=0)
    assert not [text for text in told(recwarn) if "batches of an epoch" in text]


# Running averages move with the update.


def averages(model):
    return values_of(model.non_trainable_variables)


@pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")
def test_averages_do_not_move_before_the_update_or_in_an_interrupted_window():
    model = compiled(models.normalized, accumulation_steps=3, microbatch_size=3)
    x, y = dense_data(16)
    model.train_on_batch(x[:4], y[:4])
    start = averages(model)
    model.train_on_batch(x[4:8], y[4:8])
    assert_equal(averages(model), start)
    with pytest.raises(ValueError, match="same number"):
        model.train_on_batch(x[:4], y[:3])
    model.close_window()
    assert_equal(averages(model), start)


@pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")
@pytest.mark.filterwarnings("ignore:Microbatches of:UserWarning")
@pytest.mark.parametrize("settings", [WINDOWS, PARTS])
def test_what_is_left_out_leaves_no_trace_in_averages_seeds_and_metrics(settings):
    x, y = dense_data(24)
    x[4:8] = np.nan
    trained = []

    def make():
        return keras.Sequential([models.normalized(), layers.Dropout(0.5, seed=1)])

    for skip, window in ((True, range(12)), (False, [*range(4), *range(8, 12)])):
        model = compiled(make, metrics=["mae"], skip_nonfinite=skip, **settings)
        for rows in (window, range(12, 24)):
            if settings is WINDOWS:
                model.accumulation_steps = len(rows) // 4
            for part in np.split(np.array(rows), model.accumulation_steps):
                model.train_on_batch(x[part], y[part])
        trained.append(values_of([*model.variables, *model.metrics_variables]))
    assert_equal(*trained)


# A microbatch without weight is left out, and never multiplied.


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("settings", [WINDOWS, PARTS])
def test_nan_behind_sample_weights_of_zero_is_left_out(settings, first):
    """Plain Keras on the full batch gives NaN: the reference is trained on the other samples."""
    x, y = dense_data(12)
    weights, bad = np.ones(12), x.copy()
    weights[first : first + 4], bad[first : first + 4] = 0.0, np.nan
    rest = weights > 0

    def mean():
        return arguments(loss=keras.losses.MeanSquaredError("mean_with_sample_weight"), metrics=[])

    reference, start = trained((x[rest], y[rest]), 8, compile_args=mean, epochs=1)
    found, _ = trained((bad, y, weights), compile_args=mean, epochs=1, **settings)
    assert_close(found, reference, start)
    np.testing.assert_allclose(
        found.history.history["loss"], reference.history.history["loss"], rtol=1e-5
    )


# Models that change, and models in files.


@keras.saving.register_keras_serializable("tests")
class Net(AccumulatingModel, keras.Sequential):
    pass


@pytest.mark.gate
def test_files_open_without_this_package_and_on_each_backend(tmp_path):
    """On another backend without their optimizer, of which Keras names the backend's own class."""
    model, _ = trained(dense_data(24), **WINDOWS)
    model.save(tmp_path / "model.keras")
    assert type(keras.saving.load_model(tmp_path / "model.keras")) is keras.Sequential
    np.savez(tmp_path / "weights.npz", *model.get_weights())
    code = (
        "import sys, keras, numpy as np\n"
        f"is_same = keras.backend.backend() == {BACKEND!r}\n"
        f"model = keras.saving.load_model({str(tmp_path / 'model.keras')!r}, compile=is_same)\n"
        "assert 'ga_model' not in sys.modules\n"
        f"with np.load({str(tmp_path / 'weights.npz')!r}) as expected:\n"
        "    for w, name in zip(model.get_weights(), expected):\n"
        "        np.testing.assert_array_equal(w, expected[name])\n"
        "assert not is_same or int(model.optimizer.iterations) == 4\n"
        "is_same or model.compile('sgd', 'mse')\n"
        "model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)\n"
    )
    for backend in filter(importlib.util.find_spec, ("tensorflow", "torch", "jax")):
        run_python("-c", code, KERAS_BACKEND=backend)


def clone(model):
    cloned = keras.models.clone_model(model)
    cloned.set_weights(model.get_weights())
    cloned.compile(**arguments())
    return cloned


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    ("how", "is_wrapped"),
    [
        (pickled, False),
        (clone, True),
        (pickled, True),
        (copy.deepcopy, True),
        (copy.deepcopy, False),
    ],
)
def test_copies_and_clones_train_alike(how, is_wrapped):
    """Those of a wrapped model are plain ones, those of a mixin keep the settings.

    A pickle has the files of a saved model, with the state of its optimizer.
    """
    data = dense_data(24)
    settings = {**WINDOWS, "microbatch_size": 3, "skip_nonfinite": True}
    model = seeded(dense_model if is_wrapped else lambda: Net(dense_model().layers))
    accumulate(model, **settings)
    optimizer = keras.optimizers.AdamW(0.01)
    model.compile(**arguments(**({} if how is clone else {"optimizer": optimizer})))
    model.fit(*data, batch_size=4, shuffle=False, verbose=0)
    made = how(model)
    assert made is not model
    assert type(made) is (keras.Sequential if is_wrapped else Net)
    assert int(made.optimizer.iterations) == (0 if how is clone else 2)
    if is_wrapped:
        accumulate(made, **settings)
        copied = copy.copy(model)
        assert type(copied) is keras.Sequential
        predicted = [each.predict(data[0], verbose=0) for each in (copied, model)]
        np.testing.assert_array_equal(*predicted)
    assert {name: getattr(made, name) for name in settings} == settings
    for each in (model, made):
        each.fit(*data, batch_size=4, shuffle=False, verbose=0)
    assert_equal(made.get_weights(), model.get_weights())


# Data, and what is told of it.


def test_batches_of_different_lengths_are_weighted_by_positions():
    """Positions are put in the place of samples, whose mean is the same."""
    generator = np.random.default_rng(8)
    parts = [[generator.normal(size=(4, n, k)) for k in (3, 2)] for n in (2, 9, 5)]

    def make():
        return sequential((None, 3), layers.Dense(2))

    flat = [np.concatenate([a.reshape(-1, 1, a.shape[-1]) for a in s]) for s in zip(*parts)]
    start, reference = weights_after([], make), weights_after([flat], make)
    assert relative_difference(weights_after(parts, make, **WINDOWS), reference, start) <= LIMIT


def of_positions(y, z):
    is_valid = ops.cast(ops.any(ops.not_equal(y, 0.0), axis=-1), z.dtype)
    losses_of_valid = is_valid * ops.mean(ops.square(y - z), axis=-1)
    return ops.sum(losses_of_valid) / ops.maximum(ops.sum(is_valid), 1.0)


def test_an_own_loss_of_a_masked_recurrent_model_may_have_batches_of_other_lengths():
    """Eagerly, each position runs the operations of the recurrent layer once more."""

    def make():
        cell = layers.SimpleRNN(4, return_sequences=True)
        return sequential((None, 3), layers.Masking(), cell, layers.Dense(2))

    generator, windows, batches = np.random.default_rng(8), [], []
    for lengths in ((2, 9, 5), (5, 2, 9)):
        windows.append([np.zeros((12, 9, size)) for size in (3, 2)])
        for number, length in enumerate(lengths):
            batch = [array[4 * number : 4 * number + 4, :length] for array in windows[-1]]
            for array in batch:
                array[:] = generator.normal(size=array.shape)
            batches.append(batch)
    start, reference = (weights_after(given, make, of_positions) for given in ([], windows))
    found = weights_after(batches, make, of_positions, **WINDOWS)
    assert relative_difference(found, reference, start) <= LIMIT


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("rows", [31, 36])
def test_generators_and_datasets_match(rows):
    """A step that runs into the end of the data fails after some of its operations could run."""
    x, y = dense_data(rows)
    workers = 2 if BACKEND == "tensorflow" else 1  # of which Keras on PyTorch mixes up the batches
    parts = Batches(parts_of(x, y, 4), workers=workers, max_queue_size=4)
    sources = [{"x": parts}, {"x": (part for part in parts.parts), "epochs": 1}]
    if BACKEND == "torch":
        tensors = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
        sources.append({"x": torch.utils.data.DataLoader(tensors, batch_size=4)})
    elif BACKEND == "tensorflow":
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        sources.append({"x": data.filter(lambda x, y: True)})  # of a size that is not known
        sources.append({"x": data.repeat(), "steps_per_epoch": len(parts)})
    references = {epochs: trained((x, y), epochs=epochs) for epochs in (1, 2)}
    for source in sources:
        model, fit = compiled(accumulation_steps=3, microbatch_size=3), {"epochs": 2, **source}
        model.fit(**fit, shuffle=False, verbose=0)
        assert int(model.optimizer.iterations) == 3 * fit["epochs"]
        assert_close(model, *references[fit["epochs"]])


@pytest.mark.filterwarnings("error::UserWarning")
def test_settings_that_have_an_effect_later_are_not_told_of():
    """The last batch alone is not split; and a schedule begins with other windows."""
    scheduler = AccumulationScheduler({0: 64})
    compiled(microbatch_size=8).fit(*dense_data(17), batch_size=9, verbose=0)
    accumulated = accumulate(compiled())
    accumulated.fit(*dense_data(24), batch_size=8, verbose=0, callbacks=[scheduler])


class CountsSizes:
    """A mean of its own, and the numbers of samples that it has seen."""

    def __init__(self):
        self.sizes = []

    def __call__(self, y_true, y_pred):
        self.sizes.append(int(y_true.shape[0]))
        return keras.ops.mean(keras.ops.square(y_true - y_pred))


@pytest.mark.skipif(BACKEND == "jax", reason="Keras runs no eager steps there")
@pytest.mark.parametrize("settings", [WINDOWS, PARTS])
def test_nothing_is_tried_that_is_not_to_be_verified(settings):
    """It is told of where the assumed mean matters; and exact where the step sees all samples."""
    data = dense_data(24)

    def compile_args():
        return arguments(loss=CountsSizes(), metrics=None, run_eagerly=True)

    reference, start = trained(data, compile_args=compile_args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model, _ = trained(data, compile_args=compile_args, verify=False, **settings)
    is_within = "microbatch_size" in settings
    assert len([t for t in told(caught) if "With `verify=False` it is not known" in t]) == (
        0 if is_within else 1
    )
    assert_close(model, reference, start)
    assert set(model.loss.sizes) <= {4, rows_of(settings)}  # and not the samples of a trial
    with pytest.raises(TypeError, match="verify"):
        accumulate(dense_model(), verify="no")


def of_four(y, y_pred):
    """Takes batches of one number of samples."""
    return ops.mean(ops.reshape(ops.square(y - y_pred), (4, 2)))


def nearly_a_mean(y, z):
    """Has a term that is small unless outputs are large."""
    return losses.mean(y, z) + 1e-2 * ops.square(ops.mean(ops.square(z)))


def hardest(y, z):
    """Needs more than seven samples, so that it shows in microbatches that have them."""
    return ops.mean(ops.sort(losses.per_sample(y, z))[-8:])


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("loss", "rows", "text"),
    [
        (of_four, 4, "(?s)It is not known whether.*cannot be run on some"),
        (nearly_a_mean, 4, "differs by [0-9]e-"),  # at the weights that are trained
        (hardest, 32, TRIED),
    ],
)
def test_what_is_found_of_a_loss_or_cannot_be_tried_is_told(loss, rows, text):
    model = compiled(loss=loss, accumulation_steps=2)
    with pytest.warns(UserWarning, match=text):
        model.fit(*dense_data(2 * rows), batch_size=rows, verbose=0)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="float8 layers train there")
def test_variables_that_gradients_overwrite_are_refused():
    model = accumulate(dense_model(), microbatch_size=3)
    model.trainable_variables[0].overwrite_with_gradient = True
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"gradients that overwrite their variables.*float8"):
        model.fit(*dense_data(6), verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_terms_whose_lengths_differ_in_a_window_are_told_of():
    def batches():
        for length in (3, 5):
            yield np.ones((2, length, 3)), (np.ones((2, length, 2)), np.ones((2, 2)))

    x = keras.Input((None, 3))
    pooled = layers.GlobalAveragePooling1D()(x)
    outputs = [layers.Dense(2, name="a")(x), layers.Dense(2, name="c")(pooled)]
    model = compiled(lambda: keras.Model(x, outputs), accumulation_steps=2)
    for batch in batches():  # first each in a window of its own
        for _ in range(2):
            model.train_on_batch(*batch)
    with pytest.warns(UserWarning, match="numbers per sample changed within a window"):
        model.fit(batches(), shuffle=False, verbose=0)


def test_news_of_batches_of_other_lengths_are_tried_with_what_is_alike():
    x, y = losses.some_empty_later(48, end=40)
    places = (0, 3), (8, 2), (28, 2), (4, 3)
    parts = [(x[i : i + 4, None].repeat(n, 1), y[i : i + 4]) for i, n in places]
    # One batch of several, whose samples do not change with their positions.
    joined = [np.concatenate(part) for part in zip(*[(x[:, :2], y) for x, y in parts])]
    own = losses.computing(lambda of_keras, y, z: losses.of_some_over_some(y, z))

    def make():
        pool = layers.GlobalAveragePooling1D()
        return own([keras.Input((None, 4)), pool, *dense_model().layers])

    def weights(batches, steps):
        batches = keras.tree.map_structure(ops.convert_to_tensor, batches)
        return weights_after(batches, make, None, accumulation_steps=steps)

    start, reference, found = weights([], 1), weights([joined], 1), weights(parts, 4)
    assert relative_difference(found, reference, start) <= LIMIT


class OwnDense(layers.Dense):
    """A layer of the user's, which computes as Keras's does."""


@pytest.mark.parametrize(("loss", "setting"), [(losses.mean, WINDOWS), ("mse", SPLIT)])
def test_what_shows_nothing_new_is_tried_once(loss, setting, monkeypatch):
    """Metrics count on, and losses are multiplied by weights, which is no news of the step."""
    for name in ("of_step", "of_microbatches"):
        monkeypatch.setattr(trial, name, mock.Mock(wraps=getattr(trial, name)))
    model = compiled(lambda: sequential((4,), OwnDense(2)), loss, metrics=["mae"], **setting)
    model.fit(*dense_data(48), batch_size=8, epochs=2, verbose=0)
    assert (trial.of_step.call_count, trial.of_microbatches.call_count) == (1, 0)


def centered(layer, inputs, training=None):
    outputs = ops.matmul(inputs, layer.kernel) + layer.bias
    return outputs - ops.mean(outputs, axis=0)


def with_method_of_layer(monkeypatch):
    layer = layers.Dense(5)
    layer.call = types.MethodType(centered, layer)
    return sequential((4,), layer, layers.Dense(2))


def with_call_of_model(monkeypatch):
    model = sequential((4,), layers.Dense(5), layers.Dense(2))
    first, last = model.layers
    model.call = lambda inputs, training=None, mask=None: last(centered(first, inputs))
    return model


def with_method_of_class(monkeypatch):
    monkeypatch.setattr(layers.Dense, "call", centered)
    return sequential((4,), layers.Dense(5), layers.Dense(2))


@pytest.mark.parametrize("make", [with_method_of_layer, with_call_of_model, with_method_of_class])
def test_code_that_is_put_into_layers_of_keras_is_tried(make, monkeypatch):
    model = compiled(lambda: make(monkeypatch), **WINDOWS)
    with pytest.warns(UserWarning, match=TRIED):
        model.fit(*dense_data(12), batch_size=4, verbose=0)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the tensors of PyTorch's layers: `on_torch`")
def test_a_layer_that_writes_to_a_variable_of_tensorflow_runs_on_the_full_batch():
    class Opening(layers.Layer):
        def __init__(self):
            super().__init__()
            self.calls = tf.Variable(0.0, trainable=False, name="calls")
            self.unset = tf.Variable(np.nan, trainable=False)

        def call(self, inputs, training=None):
            if training:
                self.calls.assign_add(1.0)
            return inputs * (1 + 0.1 * self.calls)

    def make():
        return sequential((4,), layers.Dense(5), Opening(), layers.Dense(2))

    reference, start = trained(dense_data(24), 12, make)
    with pytest.warns(UserWarning, match=r"it writes to \['calls:0'\] in each call"):
        model, _ = trained(dense_data(24), 12, make, **SPLIT)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= LIMIT
    assert model.layers[1].calls == reference.layers[1].calls


@pytest.mark.skipif(BACKEND == "torch", reason="traces nothing")
@pytest.mark.parametrize("setting", [{"microbatch_size": 4}, WINDOWS])
def test_the_first_batch_traces_a_model_no_more_often_than_in_plain_keras(setting, monkeypatch):
    traced, call = [], layers.Dense.call

    @functools.wraps(call)
    def counting(layer, inputs, training=None):
        traced.append(layer)
        return call(layer, inputs, training)

    monkeypatch.setattr(layers.Dense, "call", counting)
    num_traces = []
    for settings in ({}, setting):
        traced.clear()
        model = compiled(lambda: sequential((4,), layers.Dense(2)), metrics=["mae"], **settings)
        model.fit(*dense_data(40), batch_size=8, verbose=0)
        num_traces.append(len(traced))
    assert num_traces[1] <= num_traces[0]


@pytest.mark.skipif(BACKEND == "torch", reason="it looks at no operation of what was found exact")
def test_a_guard_against_numbers_that_are_not_finite_is_tried_when_it_acts():
    def guarded(y, z):
        loss = losses.mean(y, z)
        return ops.where(ops.isfinite(loss), loss, 0.0)

    x, y = dense_data(36)
    y[18] = 1e30  # in the second of three windows
    model = compiled(loss=guarded, **WINDOWS)
    with pytest.warns(UserWarning, match=TRIED):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)


class Tempered(layers.Layer):
    """Divides by a scalar, as the loss of the step does."""

    def build(self, shape):
        self.temperature = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x / (2.0 * self.temperature) / (1.0 + self.temperature)


def test_divisions_within_split_calls_are_not_taken_for_those_of_the_step():
    make = of(losses.masked_mean(losses.at_least(1e-3)), OfObjective, Tempered)
    model = compiled(make, None, accumulation_steps=3, microbatch_size=3)
    with pytest.warns(UserWarning, match="divides by other numbers than in the trial"):
        model.fit(*dense_data(24), batch_size=8, verbose=0)


def test_a_mean_is_tried_in_one_way_and_not_noted_while_it_trains(monkeypatch):
    """The divisor of a mean's gradient is the number of samples, which is known without a look."""
    make = losses.of_class(losses.computing(lambda of_keras, y, z: losses.mean(y, z)))
    model = compiled(make, None, **WINDOWS)
    runs, noted, run = [], [], StepRunner.run
    monkeypatch.setattr(StepRunner, "run", lambda *a: (runs.append(a[1:3]), run(*a))[1])
    kind = type(model._accumulation.backend)
    note = kind.noting
    monkeypatch.setattr(kind, "noting", lambda *a: (noted.append(len(a) > 3), note(*a))[1])
    model.fit(*dense_data(12), batch_size=4, verbose=0)
    num_parts, programs = (7, {7, 1}) if kind.traces else (2, {7, 4, 3, 6, 1})
    assert len(runs) == 4 * (1 + num_parts)
    assert {end - begin for begin, end in runs} == programs
    assert all(noted)  # by trials, which give what is drawn


@pytest.mark.gate
def test_a_trial_takes_the_memory_of_few_copies_of_the_weights():
    """Of one copy, two of gradients, and programs, which take as much as about 50 MB of weights."""
    script = Path(__file__).with_name("in_little_memory.py")
    peaks = [run_python(script, way, PYTHONPATH=str(ROOT))[0] for way in ("tried", "untried")]
    tried, untried = (float(printed.split()[-1]) for printed in peaks)
    assert 2.0 < tried - untried < 4.5


class Drops(OfObjective):
    def __init__(self, *more):
        drawing = [layers.Dropout(0.3, seed=1), layers.GaussianNoise(0.1, seed=2)]
        super().__init__(losses.mean, [keras.Input((4,)), dense_model(), *drawing, layers.Dense(2)])


def test_trying_leaves_no_trace():
    """All that training changes is that of a step that says what it averages over."""
    states = []
    for base in (Drops, ruled(Drops, lambda model, x, y: ops.shape(x)[0])):
        model = compiled(base, None, accumulation_steps=2)
        model.fit(*dense_data(16), batch_size=4, shuffle=False, verbose=0)
        states.append(state_of(model))
    assert_equal(*states)


class DropsByTorch(layers.Layer):
    def call(self, x, training=False):
        return torch.nn.functional.dropout(x, 0.5, training=bool(training))


@pytest.mark.every_case
@pytest.mark.parametrize("size", [1, 24])
@pytest.mark.parametrize("is_of_torch", [False, True] if BACKEND == "torch" else [False])
def test_both_passes_draw_the_same_numbers(size, is_of_torch):
    """The gradient of a kernel behind a dropout is zero exactly where its inputs were dropped."""
    drop = DropsByTorch() if is_of_torch else layers.Dropout(0.5, seed=1)
    dense = layers.Dense(1, use_bias=False)
    parts = [keras.Input((64,)), drop, dense]
    model = accumulate(OfObjective(lambda y, y_pred: keras.ops.sum(y_pred), parts))
    model.compile(keras.optimizers.SGD(1.0), microbatch_size=size, loss_over="batch")
    dense.kernel.assign(np.zeros((64, 1)))
    changes = []
    for _ in range(2):
        before = keras.ops.convert_to_numpy(dense.kernel)
        model.train_on_batch(np.eye(64, dtype="float32"), np.ones((64, 1)))
        changes.append(before - keras.ops.convert_to_numpy(dense.kernel))
        assert set(np.unique(changes[-1])) == {0.0, 2.0}
    assert np.any(changes[0] != changes[1])  # others next time


def test_an_optimizer_that_accumulates_itself_is_refused_or_told_of_once():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        accumulate(dense_model(), **WINDOWS).compile(optimizer, "mse")
    model = accumulate(dense_model(), **SPLIT)
    model.compile(optimizer, "mse")
    with pytest.warns(UserWarning, match="and pass `accumulation_steps=2`") as caught:
        model.fit(*dense_data(24), batch_size=12, epochs=2, verbose=0)
    assert len(told(caught)) == 1


def test_stateful_recurrent_models_train_in_windows_of_their_batch_size():
    """As with the accumulation of Keras's optimizers, which is exact in full windows."""

    def make():
        cell = layers.SimpleRNN(6, stateful=True, return_sequences=True)
        return keras.Sequential([keras.Input((5, 3), batch_size=8), cell, layers.Dense(1)])

    generator = np.random.default_rng(0)
    data = generator.normal(size=(96, 5, 3)), generator.normal(size=(96, 5, 1))
    data = tuple(part.astype("float32") for part in data)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    reference, start = trained(data, 8, make, lambda: arguments(optimizer=optimizer))
    why = r"batch size: 7|InvalidArgumentError: Incompatible shapes: \[7,5,1\] vs. \[8,5,1\]"
    with pytest.warns(UserWarning, match=f"(?s)cannot be run on some.*({why}). Its loss is"):
        model, _ = trained(data, 8, make, accumulation_steps=2)
    assert_close(model, reference, start)


# Batches of other names, and batches that are graphs.


class OfNames(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(2)
        self.head.build((None, 4))
        self.built = True

    def call(self, inputs):
        return 2.0 * self.head(inputs["b"]) if "b" in inputs else self.head(inputs["a"])


def test_batches_of_a_window_may_have_other_names():
    x, y = dense_data(8)
    batches = [({"a": x[:4]}, y[:4]), ({"b": x[4:]}, y[4:])]
    start, after = (weights_after(b, OfNames, accumulation_steps=2) for b in ([], batches))
    alone = (weights_after([batch], OfNames) for batch in batches)
    means = [(a + b) / 2 for a, b in zip(*alone)]
    assert_changed(after, start)
    assert relative_difference(after, means, start) <= TOLERANCE["float32"]


class OfGraph(OfNames):
    """Adds to each node what its neighbours are."""

    def call(self, inputs):
        nodes, edges = inputs
        near = ops.take(nodes, edges[0], axis=0)
        near = ops.segment_sum(near, edges[1], ops.shape(nodes)[0])
        return self.head(nodes + near)


@pytest.mark.every_case
@pytest.mark.parametrize("way", ["told", "weighs", "whole"])
def test_batches_that_are_graphs_are_weighted_by_their_nodes(way, recwarn):
    """Rows of nodes and edges are no samples, so trying them tells nothing."""
    generator = np.random.default_rng(0)
    graphs = []
    for nodes in (6, 4, 5, 7):
        edges = generator.integers(0, nodes, (2, 3 * nodes)).astype("int32")
        graphs.append(((dense_data(nodes, seed=nodes)[0], edges), dense_data(nodes)[1]))

    def union(first, second):
        ((x, edges), y), ((other, others), z) = first, second
        return (np.concatenate([x, other]), np.hstack([edges, others + len(x)])), np.vstack([y, z])

    whole = [union(*graphs[:2]), union(*graphs[2:])]
    settings = {"accumulation_steps": 2}
    if way == "whole":
        settings = {"microbatch_size": 3, "loss_over": "batch"}

    start, reference = weights_after([], OfGraph), weights_after(whole, OfGraph)
    weighs = ruled(OfGraph, lambda model, x, y: ops.cast(ops.shape(y)[0], "float32"))
    make = weighs if way == "weighs" else OfGraph
    found = weights_after(whole if way == "whole" else graphs, make, **settings)
    said = {"told": "nodes and edges of a graph", "whole": "cannot be split into microbatches"}
    messages = told(recwarn)
    assert len(messages) == (0 if way == "weighs" else 1)
    assert all(said[way] in str(message) for message in messages)
    assert_changed(found, start)
    assert relative_difference(found, reference, start) <= TOLERANCE["float32"]


class OfAdjacency(OfGraph):
    def call(self, inputs):
        nodes, adjacency = inputs
        return self.head(ops.matmul(adjacency, nodes))


def test_a_call_that_needs_all_samples_is_named_once_with_the_cause():
    batches = [
        ((dense_data(rows)[0], np.ones((rows, rows), "float32")), dense_data(rows)[1])
        for rows in (8, 9, 10)
    ]
    start, reference = weights_after([], OfAdjacency), weights_after(batches, OfAdjacency)
    cause = r"run by itself \(\w+: (?!Exception)[^{]*5"
    with pytest.warns(UserWarning, match=cause) as caught:
        found = weights_after(batches, OfAdjacency, microbatch_size=3)
    assert len(told(caught)) == 1
    assert relative_difference(found, reference, start) <= TOLERANCE["float32"]


def test_what_no_trial_shows_is_not_looked_for_in_every_window(monkeypatch):
    """The gradient of a loss with its weight in it, for one."""
    monkeypatch.setattr(trial, "of_microbatches", mock.Mock(wraps=trial.of_microbatches))

    def make():
        return sequential((4,), layers.Dense(4, activity_regularizer="l2"), layers.Dense(2))

    trained(dense_data(96), make=make, **SPLIT)
    assert trial.of_microbatches.call_count <= 4
