"""The heart: accumulation makes the updates of plain Keras on the whole window.

Covered by `test_zoo_matches_the_whole_batch`, through `fit` in graph mode, all combinations of

    models       dense, convolution, embedding, masked recurrent, attention, two outputs,
                 regularized, frozen layer, unused variable, lazily built
    optimizers   SGD, Nesterov momentum, Adam, AdamW, RMSprop, Lion
    windows      1, 2, 3 and 5 microbatches of 4 rows
    epochs       even; with a ragged last batch; with a partial last window that is ragged
    dtypes       float32 to 1e-5, float64 to 1e-12

The weights and the optimizer's state are compared after 4 to 6 updates. Adam and momentum run by
default, the other optimizers with `-m sweep`.
"""

import helpers
import keras
import numpy as np
import pytest
from helpers import TOLERANCE, assert_changed, relative_difference, scope, seeded
from zoo import OPTIMIZERS, ZOO

from ga_model import accumulate

ROWS = 4


def compiled(make, optimizer, x, start=None, steps=None):
    """Return a built, compiled model and a function that puts it back to its start."""
    with scope() if steps else scope(1):
        model = seeded(make)
        if steps:
            model = accumulate(model, accumulation_steps=steps)
        model.compile(OPTIMIZERS[optimizer](), "mse")
        model.predict(x[:1] if isinstance(x, np.ndarray) else x, verbose=0)
        if start is not None:
            model.set_weights(start)
        model.optimizer.build(model.trainable_variables)
    start = model.get_weights()
    state = [v.numpy() for v in model.optimizer.variables]

    def rewind():
        model.set_weights(start)
        for variable, value in zip(model.optimizer.variables, state, strict=True):
            variable.assign(value)

    return model, start, rewind


def epochs_of(steps):
    """Rows per epoch: even, with a ragged last batch, with a partial and ragged last window."""
    even = 2 * steps * ROWS
    yield even
    yield even - 1
    if steps > 1:
        yield 3 * steps * ROWS - ROWS - 1


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning:keras")
@pytest.mark.parametrize(
    "optimizer",
    [
        name if name in ("adam", "momentum") else pytest.param(name, marks=pytest.mark.sweep)
        for name in OPTIMIZERS
    ],
)
@pytest.mark.parametrize("name", ZOO)
def test_zoo_matches_the_whole_batch(name, optimizer, dtype, record_property):
    differences = []
    make, make_data = ZOO[name]
    x, y = make_data(80)
    reference, start, rewind_reference = compiled(make, optimizer, x)
    model, _, rewind = compiled(make, optimizer, x, start, steps=2)
    # A window of one batch is plain Keras, see test_plain.py, which replicas train differently.
    windows = (2, 3, 5, 1) if helpers.num_replicas == 1 else (2, 3)
    for steps in windows:
        model.accumulation_steps = steps
        for rows in epochs_of(steps):
            part = keras.tree.map_structure(lambda a, n=rows: a[:n], (x, y))
            arguments = {"epochs": 2, "shuffle": False, "verbose": 0}
            rewind_reference()
            reference.fit(*part, batch_size=steps * ROWS, **arguments)
            rewind()
            model.fit(*part, batch_size=ROWS, **arguments)
            updates = reference.optimizer.iterations.numpy()
            assert updates >= 4
            assert model.optimizer.iterations.numpy() == updates
            assert_changed(reference.get_weights(), start)
            difference = relative_difference(model.get_weights(), reference.get_weights(), start)
            assert difference <= TOLERANCE[dtype], (steps, rows)
            differences.append(difference)
            states = [[v.numpy() for v in m.optimizer.variables] for m in (model, reference)]
            for state, expected in zip(*states, strict=True):
                scale = max(np.abs(expected).max(), 1e-30)
                assert np.abs(state - expected).max() <= 10 * TOLERANCE[dtype] * scale
    record_property("largest_relative_difference", float(max(differences)))
