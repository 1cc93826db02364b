"""On PyTorch, state that is kept in no variable, or written past PyTorch's count of writes."""

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
    """Does so in training once it `is_writing`."""

    is_writing = False

    def call(self, x, training=None):
        return super().call(x) if training and self.is_writing else x - self.average


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
UNLIKE = "A window of microbatches does not train as the full batch"


def compare(layer, base, settings, rows=12):
    def make():
        model = base([keras.Input((4,)), layers.Dense(5), layer(), layers.Dense(2)])
        model(torch.zeros(2, 4))  # modules of PyTorch are not built before
        return model

    return difference_and_said(make, settings, rows)


@pytest.mark.every_case
@every
@pytest.mark.parametrize("base", [keras.Sequential, Step])
def test_a_split_batch_is_exact(kind, base):
    difference, said = compare(KINDS[kind], base, {"microbatch_size": 5})
    assert difference <= LIMIT
    assert ["cannot be split into microbatches" in text for text in said] == [True]


@pytest.mark.every_case
@every
def test_what_differs_in_a_window_is_told(kind):
    difference, said = compare(KINDS[kind], keras.Sequential, {"accumulation_steps": 3}, rows=4)
    assert difference > 0.1
    assert [UNLIKE in text for text in said] == [True]


def fit_and_hear(hidden, change):
    """Train windows of three batches, with a change at the beginning of the tenth batch."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(hidden(inputs)))
    model = accumulate(model, accumulation_steps=3)
    model.compile("sgd", "mse")
    x, y = dense_data(72)
    changing = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: change() if batch == 9 else None
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=4, callbacks=[changing], verbose=0)
    return told(caught)


def test_what_is_written_past_the_count_later_is_told():
    """When the step is tried again, in batch 16."""
    late = ByDataLater()
    said = fit_and_hear(
        lambda x: late(layers.Dense(5)(x)), lambda: setattr(late, "is_writing", True)
    )
    assert [UNLIKE in text and "differs" in text for text in said] == [True]


def test_a_frozen_weight_that_is_written_to_once_is_told():
    frozen = layers.Dense(5, trainable=False)

    class Writes(layers.Layer):
        is_due = False

        def call(self, x, training=None):
            if self.is_due:
                self.is_due = False
                frozen.kernel.assign(frozen.kernel * 0.5)
            return x

    writing = Writes()
    said = fit_and_hear(lambda x: writing(frozen(x)), lambda: setattr(writing, "is_due", True))
    assert [frozen.kernel.path in text and "once per microbatch" in text for text in said] == [True]


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
