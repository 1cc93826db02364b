"""`GradientAccumulator` in loops of the user's own, on any backend."""

import keras
import numpy as np
import pytest
from case import BACKEND
from gradients import gradients_of
from helpers import LIMIT, dense_data, dense_model, examples, relative_difference, seeded
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from ga_model import GradientAccumulator

if BACKEND == "tensorflow":
    import tensorflow as tf

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


DTYPES = ["float32", "float64"] if BACKEND == "tensorflow" else ["float32"]
WEIGHTS = st.lists(
    st.just(0.0) | st.floats(1e-10, 1e10) | st.integers(1, 100_000).map(float), max_size=6
)


def microbatches(number, seed, dtype):
    """Yield gradients of so many: a dense one, one that all but the first may lack, and rows.

    Of rows, these are the values and ids in a table.
    """
    generator = np.random.default_rng(seed)
    for place in range(number):
        scale, num_rows = 10.0 ** generator.integers(-3, 4), generator.integers(0, 9)
        dense, rows = generator.normal(size=(2, 3)), generator.normal(size=(num_rows, 3))
        dense, rows = ((scale * part).astype(dtype) for part in (dense, rows))
        other = None if place and num_rows < 3 else dense
        yield dense, other, (rows, generator.integers(0, 6, num_rows))


def table(rows, ids, dtype="float64"):
    """Return the gradient of a table, by the rows that were looked up."""
    found = np.zeros((6, 3), dtype)
    np.add.at(found, ids, rows)
    return found


@pytest.mark.gate
@examples(60)
@given(st.sampled_from(DTYPES), st.lists(WEIGHTS, min_size=1, max_size=3), st.integers(0, 1_000))
def test_any_weights_give_the_weighted_mean(dtype, windows, seed):
    """Of dense gradients, of some that are not there, and on TensorFlow of sparse ones.

    A window without any weight makes no update.
    """
    shapes = (2, 3), (2, 3), (6, 3)
    variables = [keras.Variable(np.zeros(shape), dtype=dtype) for shape in shapes]
    optimizer, accumulator, updates = keras.optimizers.SGD(1.0), GradientAccumulator(), 0
    for window, weights in enumerate(windows):
        total, sums, sizes = 0.0, [np.zeros(s) for s in shapes], [np.zeros(s) for s in shapes]
        parts = microbatches(len(weights), [seed, window], dtype)
        for weight, (dense, other, (rows, ids)) in zip(weights, parts):
            arrays = dense, other, table(rows, ids, dtype)
            added = [None if g is None else ops.convert_to_tensor(g) for g in arrays]
            if BACKEND == "tensorflow":
                added[2] = tf.IndexedSlices(tf.constant(rows), tf.constant(ids), shapes[2])
            accumulator.add(added, variables, weight=weight)
            total += weight
            for of_window, sign in ((sums, np.asarray), (sizes, np.abs)):
                for so_far, part in zip(of_window, (dense, other, table(sign(rows), ids))):
                    so_far += 0.0 if part is None else weight * sign(part)
        updates += total > 0
        for mean, of_window, size in zip(accumulator.mean() if total else [], sums, sizes):
            # Each of at most 48 products and sums is rounded once.
            bound = 50 * np.finfo(dtype).eps * size / total
            assert np.all(np.abs(ops.convert_to_numpy(mean) - of_window / total) <= bound)
        accumulator.apply(optimizer)
        assert int(optimizer.iterations) == updates


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
    assert repr(accumulator) == "<GradientAccumulator: 1 microbatches, 1 variables>"
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
