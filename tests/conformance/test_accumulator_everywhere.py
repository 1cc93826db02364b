"""`GradientAccumulator` in loops of the user's own, on any backend."""

import keras
import numpy as np
import pytest
from case import BACKEND
from gradients import gradients_of
from helpers import LIMIT, dense_data, dense_model, relative_difference, seeded
from keras import ops

from ga_model import GradientAccumulator

pytestmark = pytest.mark.every_case


def gradients(model, x, y, reduce):
    return gradients_of(model, lambda: reduce(ops.square(ops.subtract(model(x), y))))


@pytest.mark.parametrize("reduce", [ops.mean, ops.sum])
def test_an_own_loop_matches_the_full_batch(reduce):
    x, y = dense_data(22)
    models = [seeded(dense_model) for _ in range(2)]
    optimizers = [keras.optimizers.SGD(0.01, momentum=0.9) for _ in models]
    start = models[0].get_weights()
    accumulator = GradientAccumulator()
    for first in (0, 12):
        part = slice(first, min(first + 12, 22))
        variables = models[0].trainable_variables
        optimizers[0].apply(gradients(models[0], x[part], y[part], reduce), variables)
        variables = models[1].trainable_variables
        for begin in range(part.start, part.stop, 5):
            rows = slice(begin, min(begin + 5, part.stop))
            weight = rows.stop - rows.start if reduce is ops.mean else None
            added = gradients(models[1], x[rows], y[rows], reduce)
            accumulator.add(added, variables, weight=weight)
        accumulator.apply(optimizers[1])
        assert accumulator.num_microbatches == 0
        accumulator.apply(optimizers[1])  # nothing is left, nothing happens
    assert int(optimizers[1].iterations) == 2
    weights = [model.get_weights() for model in models]
    assert relative_difference(weights[1], weights[0], start) <= LIMIT


@pytest.mark.parametrize("around", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("weight", [3, 0.1, 1e-30, 1e30, -2.5, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_window_of_one_microbatch_returns_its_gradient_bit_for_bit(dtype, weight, around):
    """Also one beside microbatches without weight, whose gradients are NaN; zeros keep signs."""
    values = np.random.default_rng(0).normal(size=1000)
    values[:20] = np.resize([0.0, -0.0], 20)
    variable = keras.Variable(np.zeros(1000), dtype=dtype)
    gradient = ops.convert_to_tensor(values, dtype)
    nan = ops.full_like(gradient, float("nan"))
    accumulator = GradientAccumulator()
    if weight is None and around:
        pytest.skip("sums have no weights")
    for zero in around[:1]:
        accumulator.add([nan], [variable], weight=zero)
    accumulator.add([gradient], [variable], weight=weight)
    for zero in around[1:]:
        accumulator.add([nan], [variable], weight=zero)
    (mean,) = accumulator.mean()
    assert keras.backend.standardize_dtype(mean.dtype) == dtype
    found, expected = (ops.convert_to_numpy(ops.cast(t, "float32")) for t in (mean, gradient))
    assert found.tobytes() == expected.tobytes()


def test_windows_without_weight_make_no_update():
    variable = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.Adam()
    accumulator = GradientAccumulator()
    accumulator.apply(optimizer)  # nothing was added
    accumulator.add([np.array([5.0, np.nan])], [variable], weight=0)
    assert repr(accumulator) == "<GradientAccumulator: 1 microbatches, 1 variables>"
    accumulator.apply(optimizer)
    assert int(optimizer.iterations) == 0
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), [1.0, 2.0])


@pytest.mark.parametrize("weights", [(1, 64, 1000), (1000, 1, 64), (0, 1, 3), (0.7, 0.1, 5.3)])
def test_weights_that_grow_or_shrink_are_exact(weights):
    """Also of a variable without a gradient in the second microbatch."""
    gradients = np.random.default_rng(1).normal(size=(3, 50))
    variables = [keras.Variable(np.zeros(50)) for _ in range(2)]
    accumulator = GradientAccumulator()
    for number, weight in enumerate(weights):
        gradient = gradients[number]
        accumulator.add([gradient, None if number == 1 else gradient], variables, weight=weight)
    others = gradients * [[1.0], [0.0], [1.0]]
    for found, expected in zip(accumulator.mean(), (gradients, others), strict=True):
        expected = np.average(expected, axis=0, weights=weights)
        np.testing.assert_allclose(ops.convert_to_numpy(found), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_gradients_in_half_precision_sum_right(dtype):
    variable = keras.Variable(np.zeros(4), dtype=dtype)
    accumulator = GradientAccumulator()
    gradient = ops.convert_to_tensor(np.array([1.0, 2.0, -1.0, 0.5]) / 1024, dtype)
    for _ in range(1024):
        accumulator.add([gradient], [variable], weight=None)
    (mean,) = accumulator.mean()
    found = ops.convert_to_numpy(ops.cast(mean, "float32"))
    np.testing.assert_array_equal(found, [1.0, 2.0, -1.0, 0.5])


# On TensorFlow sums are variables that a graph has made: they stay, and what is not a tensor is
# TensorFlow's to refuse.
not_in_graphs = pytest.mark.xfail(BACKEND == "tensorflow", reason="sums may be those of a graph")


@not_in_graphs
def test_a_reset_forgets_the_variables():
    accumulator, variable = GradientAccumulator(), keras.Variable([1.0])
    accumulator.add([np.ones(1)], [variable], weight=1)
    accumulator.reset()
    assert accumulator.variables == []


@not_in_graphs
@pytest.mark.parametrize("convert", [np.asarray, np.ndarray.tolist])
def test_gradients_may_be_arrays(convert):
    variables = seeded(dense_model).trainable_variables
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=v.shape) for v in variables]
    accumulator = GradientAccumulator()
    given = [convert(array) for array in arrays]
    accumulator.add([None, *given[1:]], variables, weight=1)
    accumulator.add(given, variables, weight=3)
    means = [ops.convert_to_numpy(mean) for mean in accumulator.mean()]
    assert [mean.dtype for mean in means] == [np.float32] * len(variables)
    np.testing.assert_allclose(means[0], 0.75 * arrays[0], rtol=1e-6)
    for mean, array, one in zip(means[1:], arrays[1:], given[1:], strict=True):
        np.testing.assert_allclose(mean, array, rtol=1e-6)
        np.testing.assert_array_equal(one, array)  # as they were


@pytest.mark.parametrize("gradient", ["all", object(), np.zeros((4, 6), complex), [[1], [1, 2]]])
def test_gradients_that_are_no_numbers_are_refused_by_name(gradient):
    (variable, *_) = seeded(dense_model).trainable_variables
    accumulator = GradientAccumulator()
    text = f"(?s)must be a tensor, an array of real numbers or None.* for {variable.path!r}"
    with pytest.raises(TypeError, match=text):
        accumulator.add([gradient], [variable], weight=1)
    assert accumulator.num_microbatches == 0
