"""On PyTorch, layers with gradients of their own, by `torch.autograd.Function`."""

import keras
import pytest
from helpers import LIMIT
from keras import layers
from torch_step import torch
from training import difference_and_said


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, upstream):
        return upstream.clamp(-0.02, 0.01)


class OfNorm(Clipped):
    @staticmethod
    def backward(ctx, upstream):
        return upstream / upstream.norm()


class Centered(Clipped):
    @staticmethod
    def backward(ctx, upstream):
        return upstream - 0.5 * upstream.mean(0, keepdim=True)


class Reversed(Clipped):
    @staticmethod
    def backward(ctx, upstream):
        return -0.3 * upstream


class StraightThrough(Clipped):
    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return upstream * (x.abs() < 1.0)


MIXING, LINEAR = [OfNorm, Centered], [Reversed, StraightThrough]
every = pytest.mark.parametrize("rule", [Clipped, *MIXING, *LINEAR])


UNLIKE = "A window of microbatches does not train as the full batch"
WHOLE = "it has a custom gradient that combines samples"


class Own(layers.Layer):
    def __init__(self, rule):
        super().__init__()
        self.rule = rule

    def call(self, x):
        return self.rule.apply(x)


def compare(rule, settings, rows=12):
    def make():
        parts = [layers.Dense(5), Own(rule), layers.Dense(2)]
        return keras.Sequential([keras.Input((4,)), *parts])

    return difference_and_said(make, settings, rows)


@pytest.mark.every_case
@every
def test_a_split_batch_is_exact(rule):
    difference, said = compare(rule, {"microbatch_size": 5})
    assert difference <= LIMIT
    # Its call runs as a whole, which costs memory.
    assert [WHOLE in text for text in said] == [True] * (rule in MIXING)


@pytest.mark.every_case
@every
def test_what_differs_in_a_window_is_told_and_nothing_else(rule):
    difference, said = compare(rule, {"accumulation_steps": 3}, rows=4)
    if rule in LINEAR:
        assert (said, difference <= LIMIT) == ([], True)
    else:
        assert [UNLIKE in text for text in said] == [True]
        assert difference > 1e-3


def test_where_microbatches_are_asked_for_it_is_told():
    difference, said = compare(Clipped, {"microbatch_size": 5, "loss_over": "microbatch"})
    assert difference > 1e-3
    assert [UNLIKE in text for text in said] == [True]


def test_hooks_on_tensors_that_mix_samples_are_told_of():
    class Hooked(layers.Layer):
        def call(self, x):
            if x.requires_grad:
                x.register_hook(lambda g: g - 0.5 * g.mean(0, keepdim=True))
            return x * 1.0

    def make():
        return keras.Sequential([keras.Input((4,)), layers.Dense(5), Hooked(), layers.Dense(2)])

    difference, said = difference_and_said(make, {"accumulation_steps": 3}, 4)
    assert difference > 1e-3
    assert [UNLIKE in text for text in said] == [True]
    difference, _ = difference_and_said(make, {"microbatch_size": 5})
    assert difference <= LIMIT
