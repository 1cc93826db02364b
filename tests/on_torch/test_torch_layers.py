"""On PyTorch, layers that do more than Keras's: exact where a batch is split, or told.

Hooks, tensors that no variable holds, writes past PyTorch's count of them, and what Python counts.
"""

import dataclasses
import warnings

import keras
import numpy as np
import pytest
from case import TRIED, Refused
from helpers import dense_data, told
from keras import layers
from torch_step import DIFFERS, Step, case_of, check, every, model_of, torch, whole

from ga_model import accumulate

# Hooks on weights, layers and tensors, which see or change what goes through.


class Hooked(layers.Dense):
    """Clips the gradient of what it gives."""

    def call(self, x):
        outputs = super().call(x)
        if outputs.requires_grad:
            outputs.register_hook(clip)
        return outputs


class Mixing(layers.Layer):
    """Has a hook that combines the gradients of samples."""

    def call(self, x):
        if x.requires_grad:
            x.register_hook(lambda g: g - 0.5 * g.mean(0, keepdim=True))
        return x * 1.0


def clip(gradient):
    return gradient.clamp(-0.02, 0.01)


def centered(layer, inputs, outputs):
    return outputs - 0.5 * outputs.mean(0)


def halve(weight):
    weight.grad.mul_(0.5)


def on_sums(model):
    model.layers[0].kernel.value.register_post_accumulate_grad_hook(halve)


# Hook: what it is put on, and why a call with it runs whole.
HOOKS = {
    "clip": (lambda m: m.layers[0].kernel.value.register_hook(clip), None),
    "sums": (on_sums, None),
    "linear": (lambda m: m.layers[0].kernel.value.register_hook(lambda g: g * 0.5), None),
    "outputs": (
        lambda m: m.layers[0].register_forward_hook(centered),
        "it has forward hooks, which",
    ),
    "inputs": (
        lambda m: m.layers[1].register_forward_pre_hook(
            lambda layer, x: centered(layer, None, x[0])
        ),
        "it has forward hooks, which",
    ),
    "gradients": (
        lambda m: m.layers[1].register_full_backward_hook(
            lambda layer, of_inputs, of_outputs: tuple(clip(g) for g in of_inputs)
        ),
        "it has backward hooks, which",
    ),
    "tensors": (lambda m: None, "its tensors have hooks, which"),
}


def hooked(name, base):
    hook, reason = HOOKS[name]
    expects = {} if name in ("sums", "linear") else DIFFERS

    def make():
        model = model_of(base, first=Hooked if name == "tensors" else layers.Dense)()
        hook(model)
        return model

    return case_of(make, {**expects, **(whole(reason) if reason else {})})


@every(
    {f"{name}, {b.__name__}": hooked(name, b) for b in (keras.Sequential, Step) for name in HOOKS}
    | {"mixing": case_of(model_of(keras.Sequential, Mixing), DIFFERS | whole("hooks"))}
)
def test_hooks_are_exact_or_told(case, setting):
    check(case, setting)


# State that is kept in no variable, or written past PyTorch's count of writes.


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
    call = Buffer.forward


class ByData(layers.Layer):
    """Writes to a variable through `.data`."""

    def build(self, shape):
        self.average = self.add_weight(shape=(5,), initializer="zeros", trainable=False)

    def call(self, x):
        average = self.average + 0.0
        if x.device.type != "meta":
            self.average.value.data.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return x - average


class Fixed(layers.Layer):
    """Keeps tensors that nothing writes to, and the largest of its inputs, which nobody reads."""

    def __init__(self):
        super().__init__()
        self.factors = torch.linspace(0.5, 1.0, 5)
        self.order, self.mask = torch.arange(5), torch.ones(5, dtype=torch.bool)  # without a norm

    def call(self, x):
        self.largest = x.detach().amax(1)
        order, mask, factors = (t.to(x.device) for t in (self.order, self.mask, self.factors))
        return x[:, order] * mask * factors


KEEPS = {
    "buffer": lambda: layers.TorchModuleWrapper(Buffer()),
    "replaced": Replaces,
    "in place": InPlace,
    "data": ByData,
}
TENSORS = {
    f"{name}, {base.__name__}": case_of(
        model_of(base, part), DIFFERS | whole("cannot be split into microbatches")
    )
    for base in (keras.Sequential, Step)
    for name, part in KEEPS.items()
}
TENSORS["fixed"] = case_of(model_of(keras.Sequential, Fixed), settings=("windows",))


@every(TENSORS)
def test_tensors_that_layers_keep_are_exact_or_told(case, setting):
    check(case, setting)


class ByDataLater(ByData):
    """Does so in training once it `is_due`."""

    is_due = False

    def call(self, x, training=None):
        return super().call(x) if training and self.is_due else x - self.average


class WritesOnce(layers.Layer):
    """Writes to a frozen weight once it `is_due`."""

    is_due = False

    def __init__(self, frozen):
        super().__init__()
        self.weight = frozen

    def call(self, x, training=None):
        if self.is_due:
            self.is_due = False
            self.weight.assign(self.weight * 0.5)
        return x


@pytest.mark.parametrize("is_once", [False, True])
def test_what_is_written_later_is_told(is_once):
    """When the step is tried again, in batch 16, or where it is seen."""
    first = layers.Dense(5, trainable=not is_once)
    first.build((None, 4))
    late = WritesOnce(first.kernel) if is_once else ByDataLater()
    model = keras.Sequential([keras.Input((4,)), first, late, layers.Dense(2)])
    model = accumulate(model, accumulation_steps=3)
    model.compile("sgd", "mse")
    changing = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(late, "is_due", batch == 9 or late.is_due)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*dense_data(72), batch_size=4, callbacks=[changing], verbose=0)
    (said,) = told(caught)
    words = [first.kernel.path, "once per microbatch"] if is_once else [TRIED, "differs"]
    assert all(word in said for word in words)


# Calls that cannot be split run whole.


@dataclasses.dataclass
class Outputs:
    values: object


class GivesObjects(layers.Dense):
    def call(self, x):
        return Outputs(super().call(x))


class OfObjects(Step):
    def call(self, x, training=None):
        return self.layers[1](self.layers[0](x).values)

    def forward_loss(self, x, y):
        return torch.square(OfObjects.call(self, x) - y).mean()


class WithBuffers(layers.Dense):
    def build(self, shape):
        super().build(shape)
        self.register_buffer("kept", torch.ones(5))


class Borrows(layers.Dense):
    lender = None

    def call(self, x):
        return super().call(x) + Borrows.lender.value


class Lends(Step):
    def __init__(self, parts):
        super().__init__(parts)
        self.lender = Borrows.lender = self.add_weight(shape=(5,), initializer="ones")

    def forward_loss(self, x, y):
        return torch.square(self.layers[1](self.layers[0](x)) - y).mean()


class Drops(layers.Dense):
    """Leaves out samples, of which there are none among the first."""

    least = float(dense_data(31)[0][:5].min())

    def call(self, x):
        return super().call(x)[x.amin(1) >= self.least]


class Trims(layers.Dense):
    """Gives two values instead of three if the last of the samples is there."""

    last = float(np.abs(dense_data(31)[0][-1]).sum())

    def call(self, x):
        is_last = bool(((x.abs().sum(1) - self.last).abs() < 1e-5).any())
        return super().call(x)[:, : 4 if is_last else 5]


class OfFour(Step):
    """Trains without its head on four values of each sample, of those that there are."""

    def forward_loss(self, x, y):
        z = self.layers[0](x)[:, :4]
        return torch.square(z).mean().sqrt() + 0.1 * torch.square(self.layers[1].kernel.value).sum()


class IsParticular(layers.Dense):
    def call(self, x):
        if len(x) in (3, 5):
            raise ValueError("no such number")
        return super().call(x)


class Fades(layers.Dense):
    """Counts its calls in Python, and gives less with each."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return super().call(x) / (1.0 + 0.2 * self.calls)


class CountsAndCodes(Fades):
    """Is found after its first microbatch not to go by microbatches, and counts all the same."""

    def build(self, shape):
        super().build(shape)
        self.average = self.add_weight(shape=(4,), trainable=False, initializer="ones")

    def call(self, x):
        outputs = super().call(x * self.average)
        self.average.assign(0.5 * self.average + 0.5 * keras.ops.mean(x, axis=0))
        return outputs


def own(first, reason, base=Step, is_whole=True):
    expects = whole(f"takes the memory of the full batch.*{reason}" if is_whole else reason)
    return case_of(model_of(base, first=first), expects, settings=("split",))


WHOLE = {
    "objects": own(GivesObjects, "returns tensors in an object that cannot", OfObjects),
    "drops": own(Drops, "an output has the shape", OfFour),
    "trims": own(Trims, "its outputs have different shapes for different microbatches", OfFour),
    "is particular": own(IsParticular, "it cannot be run by itself"),
    "buffers": own(WithBuffers, "it has PyTorch buffers"),
    "borrows": own(Borrows, "neither its input nor its weight", Lends),
    "counts in vain": own(CountsAndCodes, "it writes to", keras.Sequential),
    "counts in Python": case_of(model_of(keras.Sequential, first=Fades), DIFFERS),
}


@every(WHOLE)
def test_calls_that_cannot_be_split_are_exact(case, setting):
    check(case, setting)


# What changes between a call and its gradient.


class Scaled(layers.Dense):
    """Has a variable that the step sets."""

    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False, name="scale")

    def call(self, x):
        return super().call(x * self.scale)


class Assigns(Step):
    def forward_loss(self, x, y):
        loss = super().forward_loss(x, y)
        self.layers[0].scale.assign(3.0)
        return loss


class WritesToInputs(Step):
    def forward_loss(self, x, y):
        x = x.clone()
        loss = super().forward_loss(x, y)
        x.mul_(2.0)
        return loss


def changed(base, first, name):
    refused = Refused(f"(?s)Received.*{name}.*was modified in between")
    return case_of(model_of(base, first=first), {"split": refused}, settings=("split",))


CHANGED = {
    "variable": changed(Assigns, Scaled, "scale"),
    "input": changed(WritesToInputs, layers.Dense, "input"),
}


@every(CHANGED)
def test_what_is_changed_before_the_gradient_is_refused_by_name(case, setting):
    check(case, setting)
