"""On JAX, the names of the package, what is refused, and sums in loops of one's own."""

import os
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from helpers import dense_data, dense_model, relative_difference, seeded
from jax import numpy as jnp
from keras import layers, ops
from pairs import TOLERANCE

import ga_model
from ga_model import AccumulatingModel, GradientAccumulator, accumulate
from ga_model.base import _validate


def test_importing_and_training_imports_no_other_backend():
    code = (
        "import sys, numpy as np\n"
        "import ga_model, keras\n"
        "from ga_model import *\n"
        "model = accumulate(keras.Sequential([keras.layers.Dense(1)]), microbatch_size=2)\n"
        "model.compile('sgd', 'mse', accumulation_steps=2)\n"
        "model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)\n"
        "print(*({'tensorflow', 'torch'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert not result.stdout.split()


def test_a_keras_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(_validate, "_OLDEST_KERAS_ON_JAX", (99, 0))
    with pytest.raises(ImportError, match=r"needs keras>=99.0 on the JAX backend\. Received"):
        _validate.check_backend("jax")


def test_all_names_are_there():
    for name in ga_model.__all__:
        assert getattr(ga_model, name) is not None


class OwnStep(keras.Sequential):
    def train_step(self, state, data):
        return keras.Sequential.train_step(self, state, data)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred))


class OwnLossWithWeight(AccumulatingModel, OwnLoss):
    def microbatch_weight(self, x, y=None, sample_weight=None):
        return x.shape[0]


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


def test_a_rule_says_what_a_loss_of_ones_own_averages_over():
    x, y = dense_data(31)
    weights = []
    for base, settings, rows in (
        (OwnLoss, {}, 12),
        (OwnLossWithWeight, {"accumulation_steps": 3}, 4),
        (OwnLossWithWeight, {"microbatch_size": 5}, 12),
    ):
        model = of(base)
        start = model.get_weights()
        model.compile(keras.optimizers.SGD(0.1), "mse", **settings)
        model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for found in weights[1:]:
        assert relative_difference(found, weights[0], start) <= TOLERANCE


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


def test_a_distribution_is_refused(monkeypatch):
    model = accumulate(dense_model(), microbatch_size=2)
    model.compile("sgd", "mse")
    monkeypatch.setattr(keras.distribution, "distribution", lambda: "one")
    with pytest.raises(ValueError, match=r"(?s)on one device.*with a `keras.distribution`"):
        model.fit(*dense_data(8), verbose=0)


def test_variables_that_gradients_overwrite_are_refused():
    model = accumulate(dense_model(), microbatch_size=2)
    model.trainable_variables[0].overwrite_with_gradient = True
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="overwrite their variables"):
        model.fit(*dense_data(8), verbose=0)


def test_an_optimizer_that_accumulates_itself_is_refused():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        accumulate(dense_model(), accumulation_steps=2).compile(optimizer, "mse")


def test_an_own_loop_over_train_step_is_refused():
    model = accumulate(dense_model(), accumulation_steps=2)
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(RuntimeError, match="by other code"):
        model.train_step(([], [], [], []), dense_data(4))


def test_parts_of_other_lengths_are_refused():
    model = accumulate(dense_model(), microbatch_size=3)
    model.compile("sgd", "mse")
    model.train_on_batch(*dense_data(6))
    with pytest.raises(ValueError, match="must have the same number of samples"):
        model.train_on_batch(dense_data(6)[0], dense_data(5)[1])


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


def gradients_of(model, x, y, reduce=ops.mean):
    def loss_of(weights):
        outputs, _ = model.stateless_call(weights, [], x, training=True)
        return reduce(ops.square(outputs - y))

    return jax.grad(loss_of)([v.value for v in model.trainable_variables])


@pytest.mark.every_case
@pytest.mark.parametrize("reduce", [ops.mean, ops.sum])
def test_an_own_loop_matches_the_full_batch(reduce):
    x, y = dense_data(22)
    models = [seeded(dense_model) for _ in range(2)]
    optimizers = [keras.optimizers.SGD(0.01, momentum=0.9) for _ in models]
    start = models[0].get_weights()
    accumulator = GradientAccumulator()
    for first in range(0, 22, 12):
        part = slice(first, min(first + 12, 22))
        variables = models[0].trainable_variables
        optimizers[0].apply(gradients_of(models[0], x[part], y[part], reduce), variables)
        variables = models[1].trainable_variables
        for begin in range(part.start, part.stop, 5):
            rows = slice(begin, min(begin + 5, part.stop))
            weight = rows.stop - rows.start if reduce is ops.mean else None
            gradients = gradients_of(models[1], x[rows], y[rows], reduce)
            accumulator.add(gradients, variables, weight=weight)
        accumulator.apply(optimizers[1])
        accumulator.apply(optimizers[1])
    assert int(optimizers[1].iterations) == 2
    weights = [model.get_weights() for model in models]
    assert relative_difference(weights[1], weights[0], start) <= TOLERANCE


def test_an_accumulator_refuses_what_it_cannot_add():
    model = seeded(dense_model)
    variables = model.trainable_variables
    gradients = [jnp.ones(v.shape) for v in variables]
    accumulator = GradientAccumulator()
    with pytest.raises(ValueError, match="one gradient for each variable"):
        accumulator.add(gradients[:1], variables, weight=1)
    with pytest.raises(ValueError, match="the shape of its variable"):
        accumulator.add(gradients[::-1], variables, weight=1)
    with pytest.raises(ValueError, match="must be a scalar number"):
        accumulator.add(gradients, variables, weight="all")
    with pytest.raises(TypeError, match="takes a Keras optimizer"):
        accumulator.apply("sgd")
    accumulator.add(gradients, variables, weight=2)
    with pytest.raises(ValueError, match="or None in every one"):
        accumulator.add(gradients, variables, weight=None)
    with pytest.raises(ValueError, match="must belong to the same variables"):
        accumulator.add(gradients[:2], variables[:2], weight=1)
    assert repr(accumulator) == "<GradientAccumulator: 1 microbatches, 4 variables>"
    accumulator.reset()
    assert accumulator.variables == []


def test_a_microbatch_without_weight_counts_for_nothing():
    model = seeded(dense_model)
    variables = model.trainable_variables
    accumulator = GradientAccumulator()
    nan = [jnp.full(v.shape, jnp.nan) for v in variables]
    ones = [jnp.ones(v.shape) for v in variables]
    accumulator.add(nan, variables, weight=0)
    accumulator.add(ones, variables, weight=3)
    for mean in accumulator.mean():
        np.testing.assert_array_equal(np.asarray(mean), 1.0)


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight", [3, 1 / 3, -2.5, None])
def test_a_window_of_one_microbatch_returns_its_gradient_bit_for_bit(weight, dtype):
    """XLA compiles what is added; zeros keep their signs."""
    values = np.random.default_rng(0).normal(size=1000)
    values[:20] = np.resize([0.0, -0.0], 20)
    gradient = jnp.asarray(values, dtype)
    accumulator = GradientAccumulator()
    variable = keras.Variable(np.zeros(1000), dtype=dtype)
    accumulator.add([gradient], [variable], weight=weight)
    (mean,) = accumulator.mean()
    assert np.asarray(mean).tobytes() == np.asarray(gradient).tobytes()


@pytest.mark.parametrize("convert", [np.asarray, np.ndarray.tolist])
def test_gradients_may_be_arrays(convert):
    model = seeded(dense_model)
    variables = model.trainable_variables
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=v.shape) for v in variables]
    accumulator = GradientAccumulator()
    given = [convert(array) for array in arrays]
    accumulator.add([None, *given[1:]], variables, weight=1)
    accumulator.add(given, variables, weight=3)
    means = accumulator.mean()
    assert [mean.dtype for mean in means] == [jnp.float32] * len(variables)
    np.testing.assert_allclose(np.asarray(means[0]), 0.75 * arrays[0], rtol=1e-6)
    for mean, array, one in zip(means[1:], arrays[1:], given[1:], strict=True):
        np.testing.assert_allclose(np.asarray(mean), array, rtol=1e-6)
        np.testing.assert_array_equal(one, array)  # as they were


@pytest.mark.parametrize("gradient", ["all", object(), np.zeros((4, 6), complex), [[1], [1, 2]]])
def test_gradients_that_are_no_numbers_are_refused_by_name(gradient):
    (variable, *_) = seeded(dense_model).trainable_variables
    accumulator = GradientAccumulator()
    text = f"(?s)must be a tensor, an array of real numbers or None.* for {variable.path!r}"
    with pytest.raises(TypeError, match=text):
        accumulator.add([gradient], [variable], weight=1)
    assert accumulator.num_microbatches == 0


def test_sums_in_a_compiled_function_are_refused():
    (variable, *_) = seeded(dense_model).trainable_variables
    accumulator = GradientAccumulator()

    @jax.jit
    def add(gradient):
        accumulator.add([gradient], [variable], weight=1)

    with pytest.raises(TypeError, match="cannot change"):
        add(jnp.ones(variable.shape))
