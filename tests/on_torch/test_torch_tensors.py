"""On PyTorch, state that is kept in no variable, or written past PyTorch's count of writes."""

import itertools
import warnings

import keras
import pytest
from helpers import (
    LIMIT,
    dense_data,
    told,
)
from keras import layers
from torch_step import Step, torch
from training import difference_and_said

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
    """Does so at chosen calls in training, and counts all of them in a variable.

    Args:
        is_chosen: function of how many calls there were.
    """

    def __init__(self, is_chosen):
        super().__init__()
        num_calls = itertools.count(1)
        self.is_next_chosen = lambda: is_chosen(next(num_calls))

    def build(self, shape):
        super().build(shape)
        arguments = {"initializer": "zeros", "trainable": False, "dtype": "int32"}
        self.number = self.add_weight(name="number", shape=(), **arguments)

    def call(self, x, training=None):
        if training and x.device.type != "meta":
            self.number.assign_add(1)
        return super().call(x) if training and self.is_next_chosen() else x - self.average


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
    assert difference <= LIMIT
    assert ["cannot be split into microbatches" in text for text in said] == [True]


@pytest.mark.every_case
@every
@pytest.mark.parametrize("size", [None, 3])
def test_what_differs_in_a_window_is_told(kind, size):
    settings = {"accumulation_steps": 3, "microbatch_size": size}
    _, said = compare(KINDS[kind], keras.Sequential, settings, rows=4)
    assert sum("average" in text and "once per microbatch" in text for text in said) == 1


@pytest.mark.every_case
@pytest.mark.parametrize("is_chosen", [lambda call: call >= 60, lambda call: not call % 16])
def test_what_is_written_past_the_count_later_is_told(is_chosen):
    inputs = keras.Input((4,))
    hidden = ByDataLater(lambda call: call > 40 and is_chosen(call))(layers.Dense(5)(inputs))
    model = accumulate(keras.Model(inputs, layers.Dense(2)(hidden)), accumulation_steps=16)
    model.compile("sgd", "mse")
    x, y = dense_data(2400)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=4, verbose=0)
    of_count, of_average = told(caught)
    assert "number" in of_count
    assert "average" in of_average
    assert "once per microbatch" in of_average


def test_a_frozen_weight_that_is_written_to_later_is_told():
    frozen = layers.Dense(5, trainable=False)

    class Writes(layers.Layer):
        def build(self, shape):
            numbers = itertools.count(1)
            self.is_due = lambda: next(numbers) == 60

        def call(self, x, training=None):
            if training and x.device.type != "meta" and self.is_due():
                frozen.kernel.assign(frozen.kernel * 0.5)
            return x

    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(Writes()(frozen(inputs))))
    model = accumulate(model, accumulation_steps=3)
    model.compile("sgd", "mse")
    x, y = dense_data(480)
    with pytest.warns(UserWarning, match=f"{frozen.kernel.path}.*once per microbatch"):
        model.fit(x, y, batch_size=4, verbose=0)


class KeepsNumbers(layers.Layer):
    """Keeps integers and bools, which have no norm."""

    def __init__(self):
        super().__init__()
        self.order, self.mask = torch.arange(5), torch.ones(5, dtype=torch.bool)

    def call(self, x):
        return x[:, self.order.to(x.device)] * self.mask.to(x.device)


def test_numbers_of_other_types_do_no_harm():
    difference, said = compare(KeepsNumbers, keras.Sequential, {"accumulation_steps": 3}, rows=4)
    assert (difference <= LIMIT, said) == (True, [])


def test_what_stays_or_is_not_read_is_not_told():
    difference, said = compare(Fixed, keras.Sequential, {"accumulation_steps": 3}, rows=4)
    assert (difference <= LIMIT, said) == (True, [])
