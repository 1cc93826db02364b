"""Train models with a step of their own, and compare all that they have changed.

References are plain Keras on the full batch.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from helpers import assert_changed, relative_difference, seeded

from ga_model import accumulate


class Training(NamedTuple):
    """What a training has changed: values before it and after it; and its logs."""

    before: list[Any]
    after: list[Any]
    logs: dict[str, Any]


def train(make, size=None, *, rows=44, batch=24, epochs=2, is_static=False, **settings):
    """Train a model as those of `own_steps`, with microbatches of `size` samples or plain Keras.

    Args:
        make: function that returns it.
        rows, batch, epochs: of `fit`.
        is_static: whether the number of samples is known when the graph is made.
        settings: of `accumulate`, which plain Keras leaves out, or of `compile`.
    """
    model = seeded(make)
    of_accumulate = {
        name: settings.pop(name)
        for name in ("accumulation_steps", "loss_over", "skip_nonfinite")
        if name in settings
    }
    if size is not None or of_accumulate:
        model = accumulate(model, microbatch_size=size, **of_accumulate)
    optimizers = compiled(model, **settings)
    state = [*model.state(), *(v for optimizer in optimizers for v in optimizer.variables)]
    before = values_of(state)
    data = model.data(rows)
    arguments = {"epochs": epochs, "shuffle": False, "verbose": 0}
    if is_static or isinstance(data, tf.data.Dataset):
        if not isinstance(data, tf.data.Dataset):
            data = tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0])
        arguments["x"] = data.batch(batch, drop_remainder=is_static)
    else:
        arguments.update(zip(("x", "y", "sample_weight"), data), batch_size=batch)
    logs = model.fit(**arguments).history
    return Training(before, values_of(state), logs)


def compiled(model, **compile_args):
    """Compile a model with the optimizers that it needs, build these, and return them."""
    optimizers = [model.optimizer_class() for _ in model.trained()]
    model.compile(*optimizers, **compile_args)
    for optimizer, variables in zip(optimizers, model.trained(), strict=True):
        optimizer.build(variables)  # by the first update, Keras would trace the step twice
    return optimizers


def values_of(variables):
    return [np.asarray(variable.numpy(), "float64") for variable in variables]


def difference(training, reference):
    return relative_difference(training.after, reference.after, reference.before)


def assert_same(training, reference, tolerance):
    assert_changed(reference.after, reference.before)
    assert difference(training, reference) < tolerance
    assert training.logs.keys() == reference.logs.keys()
    for name, values in reference.logs.items():
        np.testing.assert_allclose(training.logs[name], values, rtol=tolerance, err_msg=name)
