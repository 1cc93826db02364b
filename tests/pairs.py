"""Train a model with plain Keras and with accumulation off TensorFlow, and compare what comes out.

Off TensorFlow there is no float64 in Keras that is float64 in all operations, so what is promised
is measured: plain Keras on the full batch is trained once more with the samples of each batch in
another order, and accumulation may differ from it by so much, and a few times more.
"""

import warnings

import keras
import numpy as np
from helpers import assert_changed, dense_data, relative_difference, seeded

from ga_model import accumulate

# What the order of samples changes, at most: rounding in float32, which Adam may make more of.
TOLERANCE = 1e-5


def train(make, compile_args, data, *, rows, epochs=2, fit_args=None, **settings):
    """Return a model trained on batches of `rows` rows, with settings or plain, and its start."""
    model = seeded(make)
    if settings:
        model = accumulate(model, **settings)
    model.compile(**compile_args())
    if not model.built:
        model(keras.tree.map_structure(lambda x: x[:1], data[0]))
        keras.utils.set_random_seed(2)
        generator = np.random.default_rng(2)
        model.set_weights([generator.normal(size=w.shape) * 0.5 for w in model.get_weights()])
    start = model.get_weights()
    arguments = {"epochs": epochs, "shuffle": False, "verbose": 0, **(fit_args or {})}
    arguments.update(zip(("x", "y", "sample_weight"), data))
    model.fit(batch_size=rows, **arguments)
    assert_changed(model.get_weights(), start)
    return model, start


def train_and_hear(make, settings, rows=12, prepare=None):
    """Return the weights before and after, and what was said.

    Args:
        make: function that returns a fresh model, the same one every time.
        settings: of accumulation.
        rows: rows per batch.
        prepare: called with the model before it is compiled.
    """
    model = accumulate(seeded(make), **settings)
    if prepare is not None:
        prepare(model)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    start = model.get_weights()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(*dense_data(24), batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return start, model.get_weights(), [str(w.message) for w in caught]


def difference_and_said(make, settings, rows=12, prepare=None):
    """Return the relative difference from training on batches of 12 rows, and what was said."""
    start, weights, said = train_and_hear(make, settings, rows, prepare)
    _, expected, _ = train_and_hear(make, {}, prepare=prepare)
    return relative_difference(weights, expected, start), said


def reordered(data, rows):
    """Return data with the samples of each batch in another order."""

    def reverse(x):
        return np.concatenate([x[i : i + rows][::-1] for i in range(0, len(x), rows)])

    return keras.tree.map_structure(reverse, data)


def difference_of_fits(make, compile_args, data, *, rows, steps=1, size=None, **kwargs):
    """Return the relative difference of accumulation from plain Keras on full batches.

    Args:
        make: function that returns a fresh model, the same one every time.
        compile_args: function that returns fresh keyword arguments of `compile`.
        data: (x, y) or (x, y, sample_weight).
        rows: rows per batch.
        steps: batches per window.
        size: rows per microbatch, or None.
    """
    reference, start = train(make, compile_args, data, rows=rows * steps, **kwargs)
    settings = {"accumulation_steps": steps, "microbatch_size": size}
    model, begun = train(make, compile_args, data, rows=rows, **settings, **kwargs)
    for a, b in zip(start, begun, strict=True):
        np.testing.assert_array_equal(a, b)
    if reference.optimizer is not None:
        assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)
    return relative_difference(model.get_weights(), reference.get_weights(), start)


def difference_of_orders(make, compile_args, data, *, rows, **kwargs):
    """Return how much plain Keras differs from itself with rows in another order."""
    reference, start = train(make, compile_args, data, rows=rows, **kwargs)
    other, _ = train(make, compile_args, reordered(data, rows), rows=rows, **kwargs)
    return relative_difference(other.get_weights(), reference.get_weights(), start)


def assert_same_logs(model, reference, rtol=1e-5):
    """Compare what the last `fit` of each has logged."""
    logs, expected = model.history.history, reference.history.history
    assert list(logs) == list(expected)
    for name, values in logs.items():
        np.testing.assert_allclose(values, expected[name], rtol=rtol, atol=1e-7, err_msg=name)
