"""What users change between two trainings: the next one knows nothing stale.

The reference is plain Keras with the full batch that goes through the same changes.
"""

import keras
import pytest
from helpers import (
    TOLERANCE,
    assert_changed,
    dense_data,
    dense_model,
    relative_difference,
    seeded,
)

from ga_model import accumulate

WAYS = {
    "accumulation_steps": ({"accumulation_steps": 3}, 4),
    "microbatch_size": ({"microbatch_size": 4}, 12),
}
BOTH = ({"accumulation_steps": 3, "microbatch_size": 2}, 4)


@pytest.fixture(params=WAYS)
def pair(request, float64):
    """An accumulating model and a plain one, with the rows per batch of each."""
    settings, rows = WAYS[request.param]
    return ((accumulate(seeded(dense_model), **settings), rows), (seeded(dense_model), 12))


def fit(model, rows):
    """Train with a partial last window and a ragged last batch."""
    x, y = dense_data(30)
    model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)


def assert_same(pair):
    (model, _), (reference, _) = pair
    start = seeded(dense_model).get_weights()
    assert_changed(reference.get_weights(), start)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    assert difference <= TOLERANCE["float64"]
    assert model.optimizer.iterations == reference.optimizer.iterations


def compiled(model, optimizer=None, **arguments):
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", **arguments)


@pytest.mark.gate
def test_layers_are_frozen_and_unfrozen_without_another_compile_in_eager_mode(pair):
    for model, rows in pair:
        compiled(model, run_eagerly=True)
        for trainable in (True, False, True):
            model.layers[0].trainable = trainable
            fit(model, rows)
    assert_same(pair)


def test_without_another_compile_a_graph_keeps_the_variables_it_has(pair):
    """As Keras documents it: the trainable variables are those of `compile`."""
    for model, rows in pair:
        compiled(model)
        fit(model, rows)
        model.layers[0].trainable = False
        fit(model, rows)
    assert_same(pair)


@pytest.mark.gate
def test_another_optimizer_and_another_loss(pair):
    optimizers = [
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01),
    ]
    losses = "mse", keras.losses.MeanAbsoluteError("sum"), "mse"
    for model, rows in pair:
        for optimizer, loss in zip(optimizers, losses, strict=True):
            model.compile(optimizer(), loss)
            fit(model, rows)
    assert_same(pair)


@pytest.mark.gate
def test_the_same_optimizer_goes_on_after_another_compile(pair):
    for model, rows in pair:
        optimizer = keras.optimizers.Adam(0.01)
        for _ in range(2):
            compiled(model, optimizer)
            fit(model, rows)
    assert_same(pair)


@pytest.mark.gate
def test_weights_are_loaded_between_and_inside_of_windows(pair, tmp_path):
    """What was summed before the weights were loaded is not applied by the next `fit`."""
    x, y = dense_data(34)
    for model, rows in pair:
        compiled(model)
        fit(model, rows)
        model.save_weights(tmp_path / "model.weights.h5")
        fit(model, rows)
        if rows < 12:
            model.train_on_batch(x[:rows], y[:rows])
        model.load_weights(tmp_path / "model.weights.h5")  # with the optimizer's state
        fit(model, rows)
    assert_same(pair)


def test_settings_are_changed_between_fits(float64):
    model, reference = accumulate(seeded(dense_model)), seeded(dense_model)
    for m in (model, reference):
        compiled(m)
    for settings, rows in ((None, 12), *WAYS.values(), BOTH, (None, 12)):
        model.accumulation_steps = (settings or {}).get("accumulation_steps", 1)
        model.microbatch_size = (settings or {}).get("microbatch_size")
        fit(model, rows)
        fit(reference, 12)
        assert_same(((model, rows), (reference, 12)))
