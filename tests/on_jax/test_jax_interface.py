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


class OwnStep(keras.Sequential):
    def train_step(self, state, data):
        return keras.Sequential.train_step(self, state, data)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred))


def of(base):
    return seeded(lambda: base([keras.Input((4,)), *dense_model().layers]))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("base", "text"),
    [(OwnStep, "is not accumulated over several batches"), (OwnLoss, "averages over")],
)
@pytest.mark.parametrize("settings", [{"accumulation_steps": 2}, {"skip_nonfinite": True}])
def test_what_is_the_users_own_is_refused_in_windows(base, text, settings):
    model = accumulate(of(base), **settings)
    model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(RuntimeError, match=text):
        model.fit(*dense_data(8), batch_size=4, verbose=0)
    assert model.has_updated
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_automatic_size_is_refused():
    model = accumulate(dense_model(), microbatch_size="auto")
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="no size is searched for"):
        model.fit(*dense_data(8), verbose=0)
    model.microbatch_size = 3
    model.fit(*dense_data(8), verbose=0)
    model.microbatch_size = "auto"
    with pytest.raises(ValueError, match="no size is searched for"):
        model.fit(*dense_data(8), verbose=0)


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
