"""On JAX, the names of the package, what is refused, and sums in loops of one's own."""

import jax
import keras
import pytest
from helpers import dense_data, dense_model, seeded
from jax import numpy as jnp
from keras import ops

from ga_model import AccumulatingModel, GradientAccumulator, accumulate
from ga_model.base import _validate


def test_a_keras_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(_validate, "_OLDEST_KERAS_ON_JAX", (99, 0))
    with pytest.raises(ImportError, match=r"needs keras>=99.0 on the JAX backend\. Received"):
        _validate.check_backend("jax")


def of(base):
    return seeded(lambda: base([keras.Input((4,)), *dense_model().layers]))


class DividesInTwoWays(keras.Sequential):
    """By the marked samples, but with four samples in another way."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        marked = ops.cast(y[:, :1] > 0, "float32")
        total, count = ops.sum(marked * ops.square(y - y_pred)), ops.sum(marked)
        return total * ops.exp(-ops.log(count)) if x.shape[0] == 4 else total / count


def test_a_step_that_hides_what_it_divides_by_is_told_of():
    model = accumulate(of(DividesInTwoWays), accumulation_steps=2)
    model.compile("sgd", None)
    with pytest.warns(UserWarning, match="(?s)a number that its step divides by.*not those of"):
        model.fit(*dense_data(8), batch_size=4, verbose=0)


def test_another_distribution_than_of_data_is_refused():
    mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"], ["cpu:0"])
    layouts = keras.distribution.LayoutMap(mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )
    try:
        model = accumulate(dense_model(), microbatch_size=2)
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="with another distribution, or"):
            model.fit(*dense_data(8), verbose=0)
    finally:
        keras.distribution.set_distribution(None)


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


# Sums in loops of one's own.


def test_sums_in_a_compiled_function_are_refused():
    (variable, *_) = seeded(dense_model).trainable_variables
    accumulator = GradientAccumulator()

    @jax.jit
    def add(gradient):
        accumulator.add([gradient], [variable], weight=1)

    with pytest.raises(TypeError, match="cannot change"):
        add(jnp.ones(variable.shape))
