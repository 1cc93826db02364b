"""A step of one's own on PyTorch, and cases as the conformance suite has them."""

import case as suite
import keras
import pytest
from case import ALL, EXACT, TRIED, Case, Warns, sgd
from helpers import dense_data
from keras import layers

if keras.backend.backend() != "torch":
    pytest.skip("runs with KERAS_BACKEND=torch", allow_module_level=True)

import torch

DIFFERS = {"across": Warns(TRIED)}


class Step(keras.Sequential):
    """A step of one's own, in parts."""

    def forward_loss(self, x, y):
        return torch.square(self(x, training=True) - y).mean()

    def clear(self):
        self.zero_grad()

    def take(self, loss):
        loss.backward()

    def update(self):
        weights = self.trainable_weights
        self.optimizer.apply([w.value.grad for w in weights], weights)

    def train_step(self, data):
        x, y = data
        self.clear()
        loss = self.forward_loss(x, y)
        self.take(loss)
        with torch.no_grad():
            self.update()
        return {"own": loss.detach()}


class Tanh(torch.autograd.Function):
    """Has gradients by the rules of those that are derived from it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)


class Centered(Tanh):
    @staticmethod
    def backward(ctx, upstream):
        return upstream - 0.5 * upstream.mean(0, keepdim=True)


def whole(text):
    """Return what is expected where a call runs on the full batch."""
    return {"within": Warns(text, ALL)}


def model_of(base, *parts, first=layers.Dense):
    """Return a function that makes a small network of a class, with fresh layers inside."""

    def make():
        hidden = [first(5, activation="tanh"), *(part() for part in parts)]
        model = base([keras.Input((4,)), *hidden, layers.Dense(2)])
        model(torch.zeros(2, 4))  # modules of PyTorch are not built before
        return model

    return make


def case_of(make, expects=None, **kwargs):
    settings = kwargs.pop("settings", ("windows", "split"))
    compile_args = kwargs.pop("compile", sgd())
    return Case(make, dense_data, compile_args, expects=expects or {}, settings=settings, **kwargs)


def every(cases):
    """Give a test each setting of each case."""
    found = [(f"{name}-{s}", case, s) for name, case in cases.items() for s in case.settings]
    parameters = [pytest.param(*pair, id=name) for name, *pair in found]
    return pytest.mark.parametrize(("case", "setting"), parameters)


def check(case, setting):
    """Train a case both ways, and assert that weights or state differ where it is told so."""
    seen = suite.check(case, setting, "float32")
    expects = case.of_setting(case.expects, setting, EXACT)
    if expects is not EXACT and isinstance(expects, Warns) and "weights" not in expects.compares:
        assert max(seen["weights"], seen["variables"]) > 1e-3
