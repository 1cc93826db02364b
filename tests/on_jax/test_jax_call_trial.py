"""What a trial tells of a function: whether it treats samples one by one, or sums over them."""

import calls_alone
import keras
import numpy as np
import pytest
from calls_alone import sequential
from helpers import LIMIT, dense_data
from keras import layers, ops
from training import difference_of_fits

from ga_model.backends.jax.layer_calls import run_apart
from ga_model.core.proof.calls import kinds_of_call

ROWS = 6


def runs(function):
    return [run_apart(function, derives) for derives in (False, True)]


def kind_of(function, shape, dtype="float32"):
    samples = [np.ones((ROWS, *shape), dtype)]
    (kind,), _ = kinds_of_call(*runs(lambda _, samples: [function(*samples)]), [], samples, [])
    return kind


def kind_of_layer(layer, shape):
    groups = layer.trainable_variables, layer.non_trainable_variables
    number, options = len(groups[0]), {"training": True} if layer._call_has_training_arg else {}

    def outputs(state, samples):
        return [layer.stateless_call(state[:number], state[number:], *samples, **options)[0]]

    state = [variable.value for group in groups for variable in group]
    trained = [place < number for place in range(len(state))]
    (kind,), _ = kinds_of_call(*runs(outputs), state, [np.ones((ROWS, *shape), "float32")], trained)
    return kind


ALONE = {
    **calls_alone.ALONE,
    "spectral": lambda: sequential((5,), layers.SpectralNormalization(layers.Dense(3))),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", ALONE)
def test_layers_that_treat_samples_one_by_one(name):
    model = ALONE[name]()
    assert kind_of_layer(model, model.input_shape[1:]) == "rows"


def test_ids_are_looked_up_one_by_one():
    model = keras.Sequential([keras.Input((7,), dtype="int32"), layers.Embedding(9, 3)])
    assert kind_of(model, (7,), dtype="int32") == "rows"


MIXED = {
    "statistics": lambda: layers.BatchNormalization(),
    "along samples": lambda: layers.Softmax(axis=0),
    "norm of samples": lambda: layers.UnitNormalization(axis=0),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", MIXED)
def test_layers_that_combine_samples(name):
    layer = MIXED[name]()
    layer.build((None, 4))
    assert kind_of_layer(layer, (4,)) is None


@pytest.mark.every_case
@pytest.mark.parametrize("name", calls_alone.FUNCTIONS)
def test_functions(name):
    function, kind = calls_alone.FUNCTIONS[name]
    assert kind_of(function, (4,)) == kind


class Named(keras.Model):
    """Compares samples, so calls in it are split, of which one gives what is no array."""

    def __init__(self):
        super().__init__()
        self.first, self.last = NamedDense(3), layers.Dense(2)

    def call(self, x):
        outputs, name = self.first(x)
        assert name == "first"
        return self.last(outputs - ops.mean(outputs, axis=0))


class NamedDense(layers.Dense):
    def call(self, x):
        return super().call(x), "first"


@pytest.mark.filterwarnings("ignore:.*cannot be split:UserWarning")
def test_a_call_that_cannot_be_traced_alone_runs_whole():
    def arguments():
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}

    assert difference_of_fits(Named, arguments, dense_data(24), rows=12, size=5) <= LIMIT
