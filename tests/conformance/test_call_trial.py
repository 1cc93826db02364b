"""What a trial tells of a call: whether it treats samples one by one, or sums over them."""

import keras
import numpy as np
import pytest
from case import BACKEND
from helpers import Applies, assert_equal, sequential, values_of
from keras import layers, ops

from ga_model import accumulate
from ga_model.core.layer_calls import LayerCall
from ga_model.core.proof.calls import KNOWN, TOTAL, NotByRowsError, kinds_of
from ga_model.core.proof.noted import Draws

if BACKEND == "torch":
    import torch

    from ga_model.backends.torch.noting import Noting

pytestmark = pytest.mark.every_case

ROWS = 6
SPLIT = None, []


def tried(layer, *inputs, known=None):
    """Return why a call in training is not split, or None, and the kinds of the losses it adds.

    Args:
        known: samples of a batch, for the trial.
    """
    backend = accumulate(keras.Sequential())._accumulation.backend
    training = {"training": True} if layer._call_has_training_arg else {}
    call = LayerCall(backend, layer, layer.call, inputs, training, 2, lambda array: known)
    return call.analyze(True), call.kinds


class Own(Applies):
    def build(self, shape):
        self.weight = self.add_weight(shape=(4,), initializer="zeros")
        self.state = self.add_weight(shape=(4,), initializer="ones", trainable=False)

    def call(self, x, training=None):
        return self.function(self, x)


def own(function):
    layer = Own(function)
    layer.build((None, 4))
    return layer


def adding(*losses):
    """Return a layer that adds losses that are functions of its input."""

    def function(layer, x):
        for loss in losses:
            layer.add_loss(loss(x * layer.weight))
        return x

    return own(function)


def frozen():
    parts = [layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(13)]
    model = sequential((8, 8, 3), *parts, layers.Flatten(), layers.Dense(4))
    model.trainable = False
    return sequential((8, 8, 3), model, layers.Dense(2))


def attention():
    inputs = keras.Input((7, 8))
    heads = layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs, use_causal_mask=True)
    return keras.Model(inputs, layers.LayerNormalization()(inputs + heads))


ALONE = {
    "dense": lambda: sequential((5,), layers.Dense(4, "gelu"), layers.Dropout(0.3)),
    "attention": attention,
    "images": lambda: sequential(
        (8, 8, 4),
        layers.Conv2D(4, 3, padding="same"),
        layers.MaxPooling2D(),
        layers.GroupNormalization(2),
        layers.DepthwiseConv2D(3),
        layers.Conv2DTranspose(3, 3, strides=2),
        layers.UpSampling2D(interpolation="bilinear"),
        layers.GlobalAveragePooling2D(),
    ),
    "recurrent": lambda: sequential(
        (7, 5),
        layers.Masking(),
        layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
        layers.GRU(3, reset_after=False, dropout=0.1),
    ),
    "noise": lambda: sequential((7, 5), layers.GaussianNoise(0.1), layers.SpatialDropout1D(0.1)),
    "statistics": lambda: sequential((5,), layers.Dense(4), layers.BatchNormalization()),
    "bfloat16": lambda: sequential((5,), layers.Dense(9, dtype="mixed_bfloat16")),
    "frozen": frozen,
    "spectral": lambda: sequential((5,), layers.SpectralNormalization(layers.Dense(3))),
}

# Losses, and what they are over samples.
LOSSES = {
    "mean": (lambda x: ops.mean(ops.square(x)), "mean"),
    "mean of sums": (lambda x: 0.5 * ops.mean(ops.sum(x, axis=-1)), "mean"),
    "sum": (lambda x: -3.0 * ops.sum(ops.abs(x)), "sum"),
    "sum over a number": (lambda x: ops.sum(x) / 10.0, "sum"),
    "sum over samples": (lambda x: ops.sum(x) / ops.cast(ops.shape(x)[0], "float32"), "mean"),
    "sum of means": (lambda x: ops.mean(x) - ops.mean(ops.square(x)), "mean"),
    "mean times samples": (lambda x: ops.mean(x) * x.shape[0], "sum"),
    "an offset": (lambda x: ops.mean(x) + 1.0, "mean"),
    "root": (lambda x: ops.sqrt(ops.mean(x)), None),
    "mean and sum": (lambda x: ops.mean(x) + ops.sum(x), None),
}

# Functions, and whether they give one value per sample that follows from it alone.
FUNCTIONS = {
    "each sample": (lambda x: ops.logsumexp(x, axis=-1), True),
    "over a stack": (lambda x: ops.logsumexp(ops.stack([x, 2.0 * x]), axis=0), True),
    "against others": (lambda x: ops.matmul(x, ops.transpose(x)), False),
    "places": (lambda x: x * ops.arange(x.shape[0], dtype="float32")[:, None], False),
    "of one": (lambda x: x - x[:1], False),
    "divided by samples": (lambda x: x / x.shape[0], False),
    "flat and back": (lambda x: ops.reshape(ops.reshape(x, (-1, 2)), (-1, 4)), True),
    "loop": (
        lambda x: ops.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * v), (0, x))[1],
        True,
    ),
    "long loop": (
        lambda x: ops.while_loop(lambda v: ops.sum(v) < 90, lambda v: (v * 2,), (x,))[0],
        False,
    ),
    "unused": (lambda x: (ops.mean(x), ops.tanh(x))[1], True),
    "scattered": (lambda x: ops.scatter_update(x, [[0]], 2 * x[:1]), False),
    "not finite": (lambda x: ops.log(-x * x), False),
    "saturated": (lambda x: ops.tanh(x - 0.5 * ops.mean(ops.relu(-x), axis=0)), False),
}

if BACKEND == "torch":
    F = torch.nn.functional

    class OfTorch(layers.Layer):
        def call(self, x, training=None):
            return F.dropout(x, 0.5, training=bool(training)) + torch.randn_like(x)

    ALONE["numbers of PyTorch"] = lambda: sequential((5,), layers.Dense(4), OfTorch())
    FUNCTIONS |= {
        "constant": (torch.ones_like, False),
        "one draw": (lambda x: x * torch.rand(1), False),
        "permuted": (lambda x: x[torch.randperm(len(x))], False),
    }


# What is found of them, and of arrays.


def ones(*shape, dtype="float32"):
    return ops.ones((ROWS, *shape), dtype)


def random_state():
    return torch.get_rng_state() if BACKEND == "torch" else ()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # an error would hide an alarm
@pytest.mark.parametrize("name", ALONE)
def test_layers_that_treat_samples_one_by_one_are_known_and_left_as_they_were(name):
    layer = ALONE[name]()
    before, random = values_of(layer.variables), random_state()
    assert tried(layer, ones(*layer.input_shape[1:])) == SPLIT
    assert_equal(values_of(layer.variables), before)
    assert_equal(random_state(), random)


def test_ids_are_looked_up_one_by_one():
    layer = layers.Embedding(9, 3)
    layer.build()
    assert tried(layer, ones(7, dtype="int32")) == SPLIT
    assert tried(layer, ops.reshape(ops.arange(42.0), (ROWS, 7)) % 9) == SPLIT


class Multiplies(layers.Dense):
    def call(self, x, table):
        return ops.matmul(super().call(x), table)


def test_what_all_samples_share_may_have_another_length():
    layer = Multiplies(7)
    layer.build((None, 4))
    assert tried(layer, ones(4), ops.ones((7, 3))) == SPLIT


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function, is_alone = FUNCTIONS[name]
    reason, _ = tried(own(lambda layer, x: function(x)), ones(4))
    assert reason is None if is_alone else "it combines samples" in reason


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_told_apart(name):
    function, kind = LOSSES[name]
    assert tried(adding(function), ones(4))[1] == [kind]


def test_a_loss_that_is_zero_is_not_known():
    losses = [ops.mean, ops.sum, lambda x: 0.0 * ops.sum(x)]
    assert tried(adding(*losses), ones(4))[1] == ["mean", "sum", "zero"]


def of_rows(layer, x):
    """Compute what rounding changes much where inputs are large, which differs with the size."""
    return ops.sin(layer.weight * x * (1 + 2.0**-23 * x.shape[0]))


def combines_rounded(layer, x):
    return of_rows(layer, x) + ops.where(x == 0.0, ops.mean(x, 0, keepdims=True), 0.0)


@pytest.mark.parametrize(("function", "is_split"), [(of_rows, True), (combines_rounded, False)])
def test_samples_of_a_batch_are_tried_up_to_their_rounding(function, is_split):
    samples = np.random.default_rng(0).normal(scale=1e4, size=(KNOWN, 4)).astype("float32")
    samples[::3, 1] = 0.0
    assert tried(own(function), ones(4))[0] is None
    reason, _ = tried(own(function), ones(4), known=samples)
    assert (reason is None) == is_split


KINDS = {
    "rows": (lambda x: x * 2 + 1, "rows"),
    "masked": (lambda x: np.where(x > 0, x, -np.inf), "rows"),
    "alike": (lambda x: np.ones_like(x), "alike"),
    "zero": (lambda x: (x * 0).sum(0), "zero"),
    "sum": (lambda x: x.sum(0), "sum"),
    "mean": (lambda x: x.mean(0), "mean"),
    "maximum": (lambda x: x.max(0), None),
    "centered": (lambda x: x - 0.01 * x.mean(0, keepdims=True), None),
    "one entry": (lambda x: np.where(np.arange(x.shape[1]) == 1, x + x.sum(0), x), None),
    "not a number": (lambda x: x * np.nan, None),
}


@pytest.mark.parametrize("width", [7, 10_000])
@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_found_alike_in_small_arrays_and_in_large_ones_which_are_folded(name, width):
    function, kind = KINDS[name]
    x = np.random.default_rng(0).normal(size=(TOTAL, width)).astype("float32")
    assert kinds_of(lambda begin, end: [function(x[begin:end])]) == [kind]


# What only PyTorch has.

if BACKEND == "torch":

    def test_a_module_of_pytorch_is_known():
        parts = torch.nn.Linear(5, 4), torch.nn.Dropout(), torch.nn.Linear(4, 2)
        layer, random = layers.TorchModuleWrapper(torch.nn.Sequential(*parts)), random_state()
        assert tried(layer, ones(5)) == SPLIT
        assert_equal(random_state(), random)

    OTHER = torch.ones(4, requires_grad=True)
    MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])

    def test_what_a_zero_hides_and_what_is_of_another_layer_is_not_split():
        for function, reason in (
            (lambda layer, x: x + layer.weight * x.mean(0), "combines samples"),
            (lambda layer, x: x * OTHER, "neither its input nor its weight"),
        ):
            assert reason in tried(own(function), torch.randn(ROWS, 4))[0]

    class Late(layers.Layer):
        """Makes its variables when it is called, and looks at values."""

        def __init__(self):
            super().__init__()
            self.inner = layers.Dense(3)

        def call(self, x):
            return self.inner(x) if float(x.sum()) < 1e9 else x

    def test_a_layer_that_cannot_be_built_without_a_call_is_not_split():
        text = "it is not built, and cannot be built without a call"
        with pytest.raises(NotByRowsError, match=text):
            tried(Late(), ones(4))

    def test_a_range_of_inputs_is_kept():
        """What is looked up by them would fail, on a GPU for good."""
        table = torch.arange(8.0)
        layer = own(lambda layer, x: table[(x * 8).long()] * layer.weight)
        assert tried(layer, torch.rand(ROWS, 4)) == SPLIT

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

    DIVIDED = {
        "tensor": (lambda x: x.sum() / MASK.sum(), [3.0]),
        "number": (lambda x: x.sum() / MASK.sum().item(), [3.0]),
        "count": (lambda x: x.sum() / (MASK > 0).sum(), [3.0]),
        "bound": (lambda x: x.sum() / MASK.sum().clamp(min=1.0), [3.0, 1.0, 3.0, 3.0]),
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
