"""Train models through `fit`, plainly and with settings, and compare them, on any backend.

The measure is the relative difference of the weight change, the largest over all variables:

    ||w - w_reference|| / ||w_reference - w_start||

References are trained by plain Keras in the same process, on the same samples in the same order.
"""

import keras
import numpy as np
from helpers import (
    assert_changed,
    assert_equal,
    dense_model,
    num_updates,
    relative_difference,
    scope,
    seeded,
    set_random_seed,
    sharing,
)

from ga_model import accumulate

SETTINGS = {"accumulation_steps", "microbatch_size", "skip_nonfinite", "loss_over", "verify"}


def compiled(make=dense_model, loss="mse", optimizer=None, **arguments):
    """Return a fresh model that is compiled: a plain one without settings of `accumulate`.

    Args:
        optimizer: SGD if None.
        arguments: settings, and others of `compile`.
    """
    model = seeded(make)
    if settings := {name: arguments.pop(name) for name in SETTINGS & arguments.keys()}:
        model = accumulate(model, **settings)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **arguments)
    return model


def train(
    make,
    compile_args,
    data,
    *,
    rows,
    epochs=2,
    fit_args=None,
    builds=True,
    replicas=None,
    **settings,
):
    """Return a fresh model that was trained through `fit`, and the weights that it began with.

    These are None if it was not built.

    Args:
        make: function that returns a fresh model, the same one every time.
        compile_args: function that returns fresh keyword arguments of `compile`.
        data: (x, y), (x, y, sample_weight), or (x,).
        rows: samples per batch.
        builds: whether a model that is not built is built before, with weights that are drawn.
        replicas: devices that a model with settings is trained on, those of `--replicas` if None.
        settings: of `accumulate`; without any, it is plain Keras.
    """
    replicas = replicas if settings else 1
    with sharing(replicas):
        with scope(replicas):
            model = seeded(make)
            if settings:
                model = accumulate(model, **settings)
            model.compile(**compile_args())
            if builds and not model.built:
                model(keras.tree.map_structure(lambda x: x[:1], data[0]))
                set_random_seed(2)
                generator, weights = np.random.default_rng(2), model.get_weights()
                model.set_weights([generator.normal(size=w.shape) * 0.5 for w in weights])
            if model.built and model.optimizer:  # else Keras traces a step twice
                model.optimizer.build(model.trainable_variables)
        start = model.get_weights() if model.built else None
        arguments = {"epochs": epochs, "shuffle": False, "verbose": 0, **(fit_args or {})}
        arguments.update(zip(("x", "y", "sample_weight"), data))
        model.fit(batch_size=rows, **arguments)
    if start is not None and not settings:
        assert_changed(model.get_weights(), start)
    return model, start


def train_pair(
    make, compile_args, data, *, rows, steps=1, size=None, loss_over=None, replicas=None, **kwargs
):
    """Train two equal models: in windows of `steps` batches of `rows` samples, and on full batches.

    Args:
        size: samples per microbatch, or None.
        loss_over: the setting.
        kwargs: of `train`, as its other arguments are.

    Returns:
        The accumulating model, the reference, and the weights that both began with.
    """
    reference, start = train(make, compile_args, data, rows=rows * steps, **kwargs)
    settings = {"accumulation_steps": steps, "microbatch_size": size, "loss_over": loss_over}
    model, begun = train(
        make, compile_args, data, rows=rows, replicas=replicas, **settings, **kwargs
    )
    assert_equal(start, begun)
    if reference.optimizer is not None:
        assert num_updates(model.optimizer) == num_updates(reference.optimizer)
    return model, reference, start


def difference_of_fits(*args, **kwargs):
    """Return the relative difference of the two trainings of `train_pair`."""
    model, reference, start = train_pair(*args, **kwargs)
    return relative_difference(model.get_weights(), reference.get_weights(), start)


def reordered(data, rows, seed):
    """Return data with the samples of each batch of `rows` in another order."""
    generator = np.random.default_rng(seed)
    samples = len(keras.tree.flatten(data)[0])
    parts = np.split(np.arange(samples), range(rows, samples, rows))
    order = np.concatenate([generator.permutation(part) for part in parts])
    return tuple(keras.tree.map_structure(lambda x: x[order], part) for part in data)


def rounded(data, seed):
    """Return data with every floating-point number off by a rounding, up or down."""
    generator = np.random.default_rng(seed)

    def moved(x):
        if x.dtype.kind != "f":
            return x
        away = np.where(generator.random(x.shape) < 0.5, -np.inf, np.inf).astype(x.dtype)
        return np.where(x == 0, x, np.nextafter(x, away))

    return tuple(keras.tree.map_structure(moved, part) for part in data)


def assert_close_logs(found, expected, rtol=1e-5, atol=1e-7):
    """Compare logs, by their names: numbers, or lists of them."""
    assert list(found) == list(expected)
    for name, values in expected.items():
        pair = np.asarray(found[name], "float64"), np.asarray(values, "float64")
        np.testing.assert_allclose(*pair, rtol=rtol, atol=atol, err_msg=name)
