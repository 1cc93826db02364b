"""On PyTorch, what a trial tells of a call that only PyTorch has."""

import pytest
import torch
from calls_alone import ROWS, SPLIT, own, tried
from helpers import sequential
from keras import layers

from ga_model.backends.torch.noting import Noting
from ga_model.core.proof.calls import TOTAL, NotByRowsError, kinds_of
from ga_model.core.proof.noted import Draws


class OfTorch(layers.Layer):
    def call(self, x, training=None):
        return torch.nn.functional.dropout(x, 0.5, training=bool(training)) + torch.randn_like(x)


def wrapped():
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(), torch.nn.Linear(4, 2))
    return layers.TorchModuleWrapper(module)


ALONE = {
    "numbers of PyTorch": lambda: sequential((5,), layers.Dense(4), OfTorch()),
    "module of PyTorch": wrapped,
}


@pytest.mark.parametrize("name", ALONE)
def test_layers_that_treat_samples_one_by_one(name):
    layer, random = ALONE[name](), torch.get_rng_state()
    assert tried(layer, torch.ones(ROWS, 5)) == SPLIT
    assert torch.equal(torch.get_rng_state(), random)


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


class Clipped(Tanh):
    @staticmethod
    def backward(ctx, upstream):
        return upstream.clamp(-0.1, 0.05)


OTHER = torch.ones(4, requires_grad=True)
COMBINES = "combines samples"
REFUSED = {
    "behind a zero": (lambda layer, x: x + layer.weight * x.mean(0), COMBINES),
    "constant": (lambda layer, x: torch.ones_like(x), COMBINES),
    "one draw": (lambda layer, x: x * torch.rand(1), COMBINES),
    "permuted": (lambda layer, x: x[torch.randperm(len(x))], COMBINES),
    "borrows": (lambda layer, x: x * OTHER, "neither its input nor its weight"),
    "gradient": (lambda layer, x: Centered.apply(x * layer.weight), "custom gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_split(name):
    function, reason = REFUSED[name]
    found, _ = tried(own(function), torch.randn(ROWS, 4))
    assert reason in found


class Late(layers.Layer):
    """Makes its variables when it is called, and looks at values."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, x):
        return self.inner(x) if float(x.sum()) < 1e9 else x


def test_a_layer_that_cannot_be_built_without_a_call_is_not_split():
    with pytest.raises(NotByRowsError, match="it is not built, and cannot be built without a call"):
        tried(Late(), torch.ones(ROWS, 4))


def test_a_custom_gradient_of_each_sample_alone_is_no_reason():
    layer = own(lambda layer, x: Clipped.apply(x * layer.weight))
    assert tried(layer, torch.rand(ROWS, 4)) == SPLIT


def test_a_range_of_inputs_is_kept():
    """What is looked up by them would fail, on a GPU for good."""
    table = torch.arange(8.0)
    layer = own(lambda layer, x: table[(x * 8).long()] * layer.weight)
    assert tried(layer, torch.rand(ROWS, 4)) == SPLIT


F = torch.nn.functional
DRAWN = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand": lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(7)),
    "rand_like": torch.rand_like,
    "normal": lambda x: torch.normal(x, 1.0),
    "normal_": lambda x: torch.empty(x.shape).normal_(),
    "randint": lambda x: torch.randint(0, 50, size=(len(x), 3)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 2),
    "gamma": lambda x: torch.distributions.Gamma(x.sigmoid(), 1.0).sample(),
    "poisson": lambda x: torch.poisson(9 * x.sigmoid()),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "of several of each": lambda x: torch.bernoulli(x.sigmoid().repeat_interleave(3, 0))[::3],
}


@pytest.mark.parametrize("name", DRAWN)
def test_each_sample_has_its_own_random_numbers(name):
    samples = torch.randn(TOTAL, 4)

    def run(begin, end):
        with Noting(Draws(end - begin, TOTAL, begin, begin)):
            return [DRAWN[name](samples[begin:end]).numpy()]

    assert kinds_of(run) == ["rows"]


MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])
DIVIDED = {
    "tensor": (lambda x: x.sum() / MASK.sum(), [3.0]),
    "number": (lambda x: x.sum() / MASK.sum().item(), [3.0]),
    "count": (lambda x: x.sum() / (MASK > 0).sum(), [3.0]),
    "bound": (lambda x: x.sum() / MASK.sum().clamp(min=1.0), [3.0, 3.0, 3.0]),
    "largest": (
        lambda x: x.sum() / torch.maximum(MASK.sum(), torch.ones(())),
        [3.0, 1.0, 3.0, 3.0],
    ),
    "reciprocal": (lambda x: x.sum() * (1.0 / MASK.sum()), [3.0]),
    "power": (lambda x: x.sum() * MASK.sum() ** -1, [3.0]),
    "selected": (lambda x: x[MASK > 0].mean(), [3.0]),
    "classes": (lambda x: F.cross_entropy(x, torch.tensor([0, -100, 1, 2])), [3.0]),
    "mean": (lambda x: x.mean(), []),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_divided_by_is_noted(name):
    function, expected = DIVIDED[name]
    with Noting(None) as noting:
        function(torch.rand(4, 3, requires_grad=True))
    assert [float(value) for _, value in sorted(noting.scalars.items())] == expected
