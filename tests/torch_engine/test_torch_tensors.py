"""On PyTorch, state that is kept in no variable, or written past PyTorch's count of writes."""

import warnings

import keras
import pytest
from helpers import dense_data, told
from keras import layers
from pairs import TOLERANCE, Step, difference_and_said, torch

from ga_model import accumulate


class Buffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x):
        average = self.average.clone()
        if x.device.type != "meta":
            self.average.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - average.to(x.device)


class Replaces(layers.Layer):
    """Keeps a tensor in an attribute."""

    def __init__(self):
        super().__init__()
        self.average = torch.zeros(5)

    def call(self, x):
        average = self.average
        if x.device.type != "meta":
            self.average = 0.5 * average + 0.5 * x.detach().mean(0)
        return x - average.to(x.device)


class InPlace(Replaces):
    def call(self, x):
        average = self.average.clone()
        if x.device.type != "meta":
            self.average.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - average.to(x.device)


class ByData(layers.Layer):
    """Writes to a variable through `.data`."""

    def build(self, shape):
        arguments = {"initializer": "zeros", "trainable": False}
        self.average = self.add_weight(name="average", shape=(5,), **arguments)

    def call(self, x):
        average = self.average + 0.0
        if x.device.type != "meta":
            self.average.value.data.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - average


class ByDataLater(ByData):
    """Does so from its 60th call in training on."""

    def __init__(self, calls):
        super().__init__()
        self.note_call = lambda: calls.append(None) or len(calls) >= 60

    def call(self, x, training=None):
        return super().call(x) if training and self.note_call() else x - self.average


class Fixed(layers.Layer):
    """Keeps a tensor that nothing writes to, and the largest of its inputs, which nobody reads."""

    def __init__(self):
        super().__init__()
        self.factors = torch.linspace(0.5, 1.0, 5)

    def call(self, x):
        self.largest = x.detach().amax(1)
        return x * self.factors.to(x.device)


KINDS = {
    "buffer": lambda: layers.TorchModuleWrapper(Buffer()),
    "replaced": Replaces,
    "in place": InPlace,
    "data": ByData,
}
every = pytest.mark.parametrize("kind", KINDS)
FULL = {"microbatch_size": 5, "loss_over": "batch"}


def compare(layer, base, settings, rows=12):
    def make():
        model = base([keras.Input((4,)), layers.Dense(5), layer(), layers.Dense(2)])
        model(torch.zeros(2, 4))  # modules of PyTorch are not built before
        return model

    return difference_and_said(make, settings, rows)


@pytest.mark.every_case
@every
@pytest.mark.parametrize("base", [keras.Sequential, Step])
@pytest.mark.parametrize("settings", [{"microbatch_size": 5}, FULL], ids=str)
def test_a_split_batch_is_exact(kind, base, settings):
    difference, said = compare(KINDS[kind], base, settings)
    assert difference <= TOLERANCE
    assert ["cannot be split into microbatches" in text for text in said] == [True]


@pytest.mark.every_case
@every
@pytest.mark.parametrize("size", [None, 3])
def test_what_differs_in_a_window_is_told(kind, size):
    settings = {"accumulation_steps": 3, "microbatch_size": size}
    _, said = compare(KINDS[kind], keras.Sequential, settings, rows=4)
    assert sum("average" in text and "once per microbatch" in text for text in said) == 1


def test_what_is_written_past_the_count_later_is_told():
    calls = []
    inputs = keras.Input((4,))
    hidden = ByDataLater(calls)(layers.Dense(5)(inputs))
    model = accumulate(keras.Model(inputs, layers.Dense(2)(hidden)), accumulation_steps=3)
    model.compile("sgd", "mse")
    x, y = dense_data(240)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert len(calls) > 100
    (said,) = told(caught)
    assert "average" in said
    assert "once per microbatch" in said


def test_what_stays_or_is_not_read_is_not_told():
    difference, said = compare(Fixed, keras.Sequential, {"accumulation_steps": 3}, rows=4)
    assert (difference <= TOLERANCE, said) == (True, [])
