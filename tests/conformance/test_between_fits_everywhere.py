"""What users change between two trainings: the next one knows nothing stale, on any backend.

The reference is plain Keras with the full batch that goes through the same changes.
"""

import keras
import pytest
from case import BACKEND, PRECISION
from conftest import set_dtype
from helpers import TOLERANCE, assert_changed, dense_data, dense_model, relative_difference, seeded

from ga_model import accumulate

WINDOWS, SPLIT = {"accumulation_steps": 3}, {"microbatch_size": 4}


def optimizer():
    """Adam makes full steps of what rounding leaves of small gradients in float32."""
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    return keras.optimizers.Adam(0.01) if PRECISION == "float64" else sgd


class Trains:
    """A model that goes through changes, with settings or without."""

    def __init__(self, settings, folder):
        self.model, self.settings, self.folder = seeded(dense_model), settings, folder

    def wrap(self, **settings):
        if self.settings:
            accumulate(self.model, **(settings or self.settings))

    def compile(self, make=optimizer, loss="mse", **arguments):
        self.model.compile(make(), loss, **arguments)

    def fit(self):
        """Train with a partial last window and a ragged last batch."""
        rows = 12 // getattr(self.model, "accumulation_steps", 1)
        x, y = dense_data(30)
        self.model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)


def freezes(trains, again=True, **arguments):
    """Freeze a layer and unfreeze it, with another `compile` each time or without."""
    trains.wrap()
    trains.compile(**arguments)
    for trainable in (True, False, True):
        trains.model.layers[0].trainable = trainable
        if again:
            trains.compile(**arguments)
        trains.fit()


def freezes_eagerly(trains):
    freezes(trains, again=False, run_eagerly=True)


def freezes_without_another_compile(trains):
    """As Keras documents it: the trainable variables are those of `compile`."""
    freezes(trains, again=False)


def has_another_optimizer_and_loss(trains):
    trains.wrap()
    trains.compile()
    trains.fit()
    trains.compile(lambda: keras.optimizers.SGD(0.1), keras.losses.MeanAbsoluteError("sum"))
    trains.fit()
    trains.compile()
    trains.fit()


def keeps_its_optimizer(trains):
    trains.wrap()
    kept = optimizer()
    for _ in range(2):
        trains.compile(lambda: kept)
        trains.fit()


def loads_weights(trains):
    """What was summed before the weights were loaded is not applied by the next `fit`."""
    trains.wrap()
    trains.compile()
    trains.fit()
    trains.model.save_weights(trains.folder / "model.weights.h5")
    trains.fit()
    if trains.settings == WINDOWS:
        trains.model.train_on_batch(*dense_data(4))
    trains.model.load_weights(trains.folder / "model.weights.h5")  # with the optimizer's state
    trains.fit()


def is_wrapped_when_it_has_trained(trains):
    trains.compile()
    trains.fit()
    kept = trains.model.optimizer
    trains.wrap()
    assert trains.model.optimizer is kept
    trains.fit()


def has_other_settings(trains):
    trains.compile()
    trains.fit()
    off = dict.fromkeys((*WINDOWS, *SPLIT))
    for settings in ({**off, **WINDOWS}, {**off, **SPLIT}, {**WINDOWS, "microbatch_size": 2}, off):
        trains.wrap(**settings)
        trains.fit()


CHANGES = [freezes, is_wrapped_when_it_has_trained, has_other_settings, loads_weights]
CHANGES += [has_another_optimizer_and_loss, keeps_its_optimizer]
CHANGES += [freezes_eagerly] if BACKEND != "jax" else []
CHANGES += [freezes_without_another_compile] if BACKEND == "tensorflow" else []


@pytest.mark.parametrize("settings", [WINDOWS, SPLIT], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_trains_as_plain_keras(change, settings, tmp_path):
    set_dtype(PRECISION)
    trained = []
    for given in (settings, None):
        trains = Trains(given, tmp_path)
        start = trains.model.get_weights()
        change(trains)
        trained.append(trains.model)
    weights = [model.get_weights() for model in trained]
    assert_changed(weights[1], start)
    assert relative_difference(*weights, start) <= TOLERANCE[PRECISION]
    assert int(trained[0].optimizer.iterations) == int(trained[1].optimizer.iterations)
