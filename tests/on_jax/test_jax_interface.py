"""On JAX, the names of the package, what is refused, and sums in loops of one's own."""

import jax
import keras
import numpy as np
import pytest
from helpers import (
    dense_data,
    dense_model,
    seeded,
)
from jax import numpy as jnp
from keras import layers, ops

from ga_model import AccumulatingModel, GradientAccumulator, accumulate
from ga_model.base import _validate


def test_a_keras_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(_validate, "_OLDEST_KERAS_ON_JAX", (99, 0))
    with pytest.raises(ImportError, match=r"needs keras>=99.0 on the JAX backend\. Received"):
        _validate.check_backend("jax")


class Logging(keras.Sequential):
    """Keras's step, with logs of its own."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        largest = ops.mean(ops.max(data[0], axis=-1))
        return {**logs, "largest": largest, "rate": ops.convert_to_tensor(0.5)}, state


class Doubling(keras.Sequential):
    """Logs what it computes with the result of a metric, which waits for the window."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "twice": 2 * logs["loss"]}, state


def of(base):
    return seeded(lambda: base([keras.Input((4,)), *dense_model().layers]))


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [{"accumulation_steps": 3}, {"skip_nonfinite": True}])
def test_logs_of_a_step_are_those_of_the_window(settings):
    def logs_of(rows, **settings):
        model, seen = accumulate(of(Logging), **settings), []
        model.compile("sgd", "mse", metrics=["mae"])
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda i, logs: seen.append(logs))
        model.fit(*dense_data(12), batch_size=rows, shuffle=False, verbose=0, callbacks=[note])
        return seen[-1]

    logs = logs_of(4 if "accumulation_steps" in settings else 12, **settings)
    expected = logs_of(12)
    assert list(logs) == list(expected) == ["largest", "loss", "mae", "rate"]
    for name, value in expected.items():
        assert logs[name] == pytest.approx(value, rel=1e-5)


def test_a_log_of_the_result_of_a_metric_is_told_of():
    model = accumulate(of(Doubling), accumulation_steps=2)
    model.compile("sgd", "mse")
    with pytest.warns(
        UserWarning, match="(?s)does not train as the full batch.*the log 'twice' differs,"
    ):
        model.fit(*dense_data(8), batch_size=4, verbose=0)


class Raising(keras.Sequential):
    """Takes batches of one number of samples."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.reshape(ops.square(y - y_pred), (4, 2)))


def test_what_cannot_be_tried_is_told_of():
    model = accumulate(of(Raising), accumulation_steps=2)
    model.compile("sgd", None)
    with pytest.warns(UserWarning, match="(?s)not known whether a window.*cannot reshape"):
        model.fit(*dense_data(8), batch_size=4, verbose=0)


class DividesInTwoWays(keras.Sequential):
    """By the marked samples, but with four samples in another way."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        marked = ops.cast(y[:, :1] > 0, "float32")
        total, count = ops.sum(marked * ops.square(y - y_pred)), ops.sum(marked)
        return total * ops.exp(-ops.log(count)) if x.shape[0] == 4 else total / count


def test_a_step_that_hides_what_it_divides_by_is_told_of():
    model = accumulate(of(DividesInTwoWays), accumulation_steps=2)
    model.compile("sgd", None)
    with pytest.warns(UserWarning, match="(?s)a number that its step divides by.*with 4 samples"):
        model.fit(*dense_data(8), batch_size=4, verbose=0)


def test_a_trial_leaves_the_model_as_it_was():
    model = accumulate(of(Logging), accumulation_steps=9)
    model.compile("sgd", "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    before = [np.array(v.value) for v in (*model.variables, *model.optimizer.variables)]
    model.train_on_batch(*dense_data(4))
    after = [np.array(v.value) for v in (*model.variables, *model.optimizer.variables)]
    names = [v.path for v in (*model.variables, *model.optimizer.variables)]
    changed = [n for n, a, b in zip(names, before, after, strict=True) if not np.array_equal(a, b)]
    assert all(name.startswith(("loss", "mean_absolute")) for name in changed)


def test_another_distribution_than_of_data_is_refused():
    mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"], ["cpu:0"])
    layouts = keras.distribution.LayoutMap(mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    try:
        model = accumulate(dense_model(), microbatch_size=2)
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="with another distribution"):
            model.fit(*dense_data(8), verbose=0)
    finally:
        keras.distribution.set_distribution(None)


def test_variables_that_gradients_overwrite_are_refused():
    model = accumulate(dense_model(), microbatch_size=2)
    model.trainable_variables[0].overwrite_with_gradient = True
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="overwrite their variables"):
        model.fit(*dense_data(8), verbose=0)


def test_an_own_loop_over_train_step_is_refused():
    model = accumulate(dense_model(), accumulation_steps=2)
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(RuntimeError, match="by other code"):
        model.train_step(([], [], [], []), dense_data(4))


class Keeps(AccumulatingModel, keras.Sequential):
    other = None

    def on_update(self):
        type(self).other.assign(1.0)


def test_on_update_writes_to_variables_of_the_model_only():
    Keeps.other = keras.Variable(0.0)
    model = of(Keeps)
    model.compile("sgd", "mse", accumulation_steps=2)
    with pytest.raises(RuntimeError, match="writes to another variable"):
        model.fit(*dense_data(8), batch_size=4, verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_terms_whose_lengths_differ_in_a_window_are_told_of():
    def make():
        parts = [layers.Dense(2, name="a"), layers.Flatten(name="b")]
        x = keras.Input((None, 3))
        pooled = layers.GlobalAveragePooling1D()(x)
        return keras.Model(x, [parts[0](x), layers.Dense(2, name="c")(pooled)])

    def batches():
        for length in (3, 5):
            yield np.ones((2, length, 3)), (np.ones((2, length, 2)), np.ones((2, 2)))

    model = accumulate(make(), accumulation_steps=2)
    model.compile("sgd", ["mse", "mse"])
    for batch in batches():  # first each in a window of its own
        for _ in range(2):
            model.train_on_batch(*batch)
    with pytest.warns(UserWarning, match="numbers per sample changed within a window"):
        model.fit(batches(), shuffle=False, verbose=0)


# Sums in loops of one's own.


def test_sums_in_a_compiled_function_are_refused():
    (variable, *_) = seeded(dense_model).trainable_variables
    accumulator = GradientAccumulator()

    @jax.jit
    def add(gradient):
        accumulator.add([gradient], [variable], weight=1)

    with pytest.raises(TypeError, match="cannot change"):
        add(jnp.ones(variable.shape))
