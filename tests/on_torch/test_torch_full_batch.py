"""On PyTorch, any step is exact with `microbatch_size`: it runs on the full batch.

Its calls of layers go by microbatches, forward and again backward. Nothing else is told of it.
"""

import gc
import sys
import types

import keras
import numpy as np
import pytest
from helpers import (
    LIMIT,
    dense_data,
    relative_difference,
    seeded,
)
from keras import layers, ops
from torch_step import torch

from ga_model import accumulate
from ga_model.backends.torch import layer_calls
from ga_model.backends.torch.adapter import TorchBackend
from ga_model.core.layer_calls import LayerCall
from ga_model.core.proof.calls import NotByRowsError


def mlp(inputs, outputs, **arguments):
    parts = [layers.Dense(7, activation="tanh"), layers.Dense(outputs)]
    return keras.Sequential([keras.Input((inputs,)), *parts], **arguments)


def weights_of(*parts):
    return [w for part in parts for w in part.trainable_weights]


class Step(keras.Model):
    """A step of one's own, that takes the gradient of `loss_of`."""

    def __init__(self):
        super().__init__()
        self.net = self.make()

    def make(self):
        return mlp(4, 3)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.loss_of(x, y)
        loss.backward()
        self.update(weights_of(self.net))
        return {"own": loss.detach()}

    def update(self, weights, optimizer=None):
        with torch.no_grad():
            (optimizer or self.optimizer).apply([w.value.grad for w in weights], weights)


def contrast(a, b):
    scores = torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T
    return -torch.log_softmax(4 * scores, 1).diagonal().mean()


class SimCLR(Step):
    def loss_of(self, x, y):
        return contrast(self.net(x, training=True), self.net(x[:, [1, 0, 3, 2]], training=True))


class JoinedViews(Step):
    """Calls its net on twice the samples."""

    def loss_of(self, x, y):
        both = self.net(torch.cat([x, x.flip(1)]), training=True)
        return contrast(both[: len(x)], both[len(x) :])


class MaskedMean(Step):
    def loss_of(self, x, y):
        mask = (y[:, :1] > 0.5).to(x.dtype)
        return ((self.net(x)[:, :2] - y) ** 2 * mask).sum() / (mask.sum() + 1e-3)


class RootOfMean(Step):
    def loss_of(self, x, y):
        return torch.sqrt(((self.net(x)[:, :2] - y) ** 2).mean())


class Clipping(MaskedMean):
    def update(self, weights, optimizer=None):
        torch.nn.utils.clip_grad_norm_([w.value for w in weights], 0.03)
        super().update(weights, optimizer)


class ByFunction(RootOfMean):
    def train_step(self, data):
        weights = weights_of(self.net)
        loss = self.loss_of(*data)
        gradients = torch.autograd.grad(loss, [w.value for w in weights])
        with torch.no_grad():
            self.optimizer.apply([2 * g for g in gradients], weights)
        return {"own": loss.detach()}


class Unused(Step):
    """Of whose weights some get no gradient."""

    def make(self):
        inputs = keras.Input((4,))
        return keras.Model(inputs, [mlp(4, 2)(inputs), mlp(4, 3)(inputs)])

    def loss_of(self, x, y):
        first, _ = self.net(x)
        return 0.02 * ((first - y) ** 2).sum()

    def update(self, weights, optimizer=None):
        used = [w for w in weights if w.value.grad is not None]
        assert len(used) == 4
        super().update(used, optimizer)


class Sequences(Step):
    """With masks, positions, and layers called one by one."""

    def make(self):
        self.embed = layers.Embedding(9, 4, mask_zero=True)
        self.positions = layers.Embedding(5, 4)
        self.recur = layers.LSTM(3)
        return layers.Dense(2)

    def call(self, x):
        ids = (torch.cat([x, x[:, :1]], 1).abs() * 4).long().clamp(0, 8)
        embedded = self.embed(ids)
        mask = embedded._keras_mask
        embedded = embedded + self.positions(torch.arange(5))
        return self.net(self.recur(embedded, mask=mask))

    def loss_of(self, x, y):
        outputs = Sequences.call(self, x)  # each layer by itself
        return torch.sqrt(((outputs - y) ** 2).mean())

    def update(self, weights, optimizer=None):
        parts = (self.embed, self.positions, self.recur, self.net)
        super().update(weights_of(*parts), optimizer)


STEPS = [JoinedViews, Clipping, ByFunction, Unused, Sequences]


def fit(make, size=None, optimizer=None, loss=None, rows=12, data=None, **settings):
    """Return weights and variables of optimizers before and after, and the logs."""
    model = seeded(make)
    if size or settings:
        model = accumulate(model, microbatch_size=size, **settings)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss)
    data = dense_data(31) if data is None else data
    if not model.built:
        model(data[0][:2])
    start = model.get_weights()
    logs = model.fit(*data, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return start, model.get_weights(), logs


def compare(make, size=5, optimizer=lambda: keras.optimizers.SGD(0.1), **arguments):
    start, expected, logs = fit(
        make, None, optimizer(), **{k: arguments[k] for k in ("loss", "data") if k in arguments}
    )
    _, weights, own = fit(make, size, optimizer(), **arguments)
    for name, values in logs.history.items():
        np.testing.assert_allclose(own.history[name], values, rtol=1e-5, err_msg=name)
    return relative_difference(weights, expected, start)


@pytest.mark.every_case
@pytest.mark.parametrize("size", [5, 1])
@pytest.mark.parametrize("step", STEPS)
def test_any_step_matches_the_full_batch(step, size):
    assert compare(step, size) <= LIMIT


class Counting(layers.Dense):
    seen = None

    def call(self, x):
        if not keras.src.backend.common.symbolic_scope.in_symbolic_scope():
            Counting.seen.append(len(x))
        return super().call(x)


def test_no_layer_sees_more_samples_than_a_microbatch():
    class Seen(SimCLR):
        def make(self):
            return keras.Sequential([keras.Input((4,)), Counting(3)])

    Counting.seen = []
    fit(Seen, 5, data=dense_data(12))
    # It is built by two, and tried on up to five. Then two views go forward, and back.
    assert max(Counting.seen) == 5
    assert Counting.seen[-24:] == [5, 5, 2] * 8


# State that calls read and write.


class InParts(keras.Model):
    """Plain Keras, but its one pass calls the net on one microbatch after the other."""

    def __init__(self, size, normalization):
        super().__init__()
        parts = [layers.Dense(6, activation="tanh"), layers.Dropout(0.4, seed=3)]
        parts += [layers.BatchNormalization(momentum=0.7)] if normalization else []
        self.net = keras.Sequential([keras.Input((4,)), *parts, layers.Dense(2)])
        self.size = size

    def call(self, x, training=False):
        shares = range(0, len(x), self.size or len(x))
        parts = [self.net(x[i : i + (self.size or len(x))], training=training) for i in shares]
        return torch.cat(parts)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = torch.sqrt(((self(x, training=True) - y) ** 2).mean())
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {"own": loss.detach()}


@pytest.mark.parametrize("normalization", [False, True])
@pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")
def test_both_passes_draw_the_same_numbers_and_state_moves_once(normalization):
    start, expected, _ = fit(lambda: InParts(5, normalization))
    _, weights, _ = fit(lambda: InParts(None, normalization), 5)
    assert relative_difference(weights[:4], expected[:4], start[:4]) <= LIMIT
    # Running averages move by all samples: see `test_torch_normalization.py`.
    assert not normalization or np.any(weights[4] != start[4])


class OfTorch(layers.Layer):
    """Draws by PyTorch itself."""

    def call(self, x, training=False):
        return torch.nn.functional.dropout(x, 0.5, training=bool(training))


def test_numbers_that_pytorch_draws_are_the_same_in_both_passes():
    class Draws(Step):
        def make(self):
            return keras.Sequential([keras.Input((4,)), layers.Dense(6), OfTorch()])

        def loss_of(self, x, y):
            outputs = self.net(x, training=True)
            self.is_zero = (outputs == 0).detach()
            outputs.sum().backward(retain_graph=True)
            (bias,) = (w.value.grad for w in self.net.trainable_weights[1:])
            # The gradient of a bias counts what was not dropped, each twice.
            assert torch.equal(bias, 2.0 * (~self.is_zero).sum(0))
            self.zero_grad()
            return outputs.sum()

    fit(Draws, 5)


# What cannot be split runs whole.


class Centers(layers.Layer):
    def call(self, x):
        return x - 0.5 * ops.mean(x, axis=0, keepdims=True)


class Keeps(layers.Dense):
    def call(self, x):
        self.kept = super().call(x)
        return self.kept


class Counts(layers.Dense):
    def build(self, shape):
        super().build(shape)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return super().call(x) * (1.0 + 0.01 * self.calls)


class WithBuffers(layers.Dense):
    def build(self, shape):
        super().build(shape)
        self.register_buffer("kept", torch.ones(3))


class Borrows(layers.Dense):
    lender = None

    def call(self, x):
        return super().call(x) + Borrows.lender.value


class Drops(layers.Dense):
    """Leaves out samples, of which there are none among the first."""

    least = float(dense_data(31)[0][:5].min())

    def call(self, x):
        return super().call(x)[x.amin(1) >= self.least]


class Trims(layers.Dense):
    """Gives two values instead of three if the last of the samples is there, in any view."""

    last = float(np.abs(dense_data(31)[0][-1]).sum())

    def call(self, x):
        outputs = layers.Dense.call(self, x)
        is_last = bool(((x.abs().sum(1) - self.last).abs() < 1e-5).any())
        return outputs[:, :2] if is_last else outputs


class IsParticular(layers.Dense):
    def call(self, x):
        if len(x) in (3, 5):
            raise ValueError("no such number")
        return super().call(x)


WHOLE = {
    "drops": (lambda: Drops(3), "gives something other than one value per sample"),
    "trims": (lambda: Trims(3), "its outputs have different shapes for different microbatches"),
    "is particular": (lambda: IsParticular(3), "it cannot be run by itself"),
    "mixes": (lambda: keras.Sequential([layers.Dense(3), Centers()]), "it combines samples"),
    "keeps": (lambda: Keeps(3), "stores a tensor in its attribute `kept`"),
    "counts": (lambda: Counts(3), "it writes to .*in each call"),
    "buffers": (lambda: WithBuffers(3), "it has PyTorch buffers"),
    "borrows": (lambda: Borrows(3), "neither its input nor its weight"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_split_runs_whole_exactly_and_is_told(name):
    make_part, reason = WHOLE[name]

    class Whole(SimCLR):
        def make(self):
            self.lender = self.add_weight(shape=(3,), initializer="ones")
            Borrows.lender = self.lender
            part = make_part()
            part.build((None, 4))
            return part

    with pytest.warns(UserWarning, match=f"takes the memory of the full batch.*{reason}"):
        assert compare(Whole) <= LIMIT


class NetInAnObject(RootOfMean):
    """Keeps its network where the model does not look for layers."""

    net = property(lambda self: self.holder.net)

    def __init__(self):
        keras.Model.__init__(self)
        self.holder = types.SimpleNamespace(net=mlp(4, 3))

    def zero_grad(self, set_to_none=True):
        self.net.zero_grad(set_to_none)

    def update(self, weights, optimizer=None):
        for weight in weights:  # which are none of those that the model's optimizer is for
            weight.assign(weight - 0.1 * weight.value.grad)


def test_a_step_in_which_no_call_is_split_is_told_of():
    with pytest.warns(UserWarning, match="No call of a layer goes by microbatches in"):
        fit(NetInAnObject, 5)


class Late(layers.Layer):
    """Makes its variables when it is called, and looks at values."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, x):
        return self.inner(x) if float(x.sum()) < 1e9 else x


def test_a_layer_that_cannot_be_built_without_a_call_is_not_split():
    layer = Late()
    with pytest.raises(NotByRowsError, match="it is not built, and cannot be built without a call"):
        LayerCall(TorchBackend(layer), layer, layer.call, (torch.ones(6, 4),), {}, 2)


def test_what_a_call_holds_is_gone_with_its_outputs():
    kept = []
    original = layer_calls.Microbatches.__init__

    def noting(self, *args):
        import weakref

        original(self, *args)
        kept.append(weakref.ref(self))

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_calls.Microbatches, "__init__", noting)
            fit(SimCLR, 5)
        assert len(kept) == 12  # two calls in each of six steps
        assert [call() for call in kept] == [None] * 12
    finally:
        gc.enable()


MEMORY = """
import sys, torch, keras
torch.set_num_threads(1)
from ga_model import accumulate

class Net(keras.Sequential):
    def train_step(self, data):
        x, y, _ = data
        self.zero_grad()
        loss = torch.sqrt(((self(x, training=True) - y) ** 2).mean())
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {}

rows, size = map(int, sys.argv[1:])
parts = [keras.layers.Conv2D(16, 3, padding="same", activation="gelu") for _ in range(8)]
parts += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
model = Net([keras.Input((32, 32, 3)), *parts])
if size:
    model = accumulate(model, microbatch_size=size)
model.compile("sgd")
peak = lambda: int(next(l for l in open("/proc/self/status") if "VmHWM" in l).split()[1]) / 1e3
x, y = torch.zeros(rows, 32, 32, 3), torch.zeros(rows, 1)
model.train_on_batch(x[:2], y[:2])
before = peak()
model.train_on_batch(x, y)
print(peak() - before)
"""


@pytest.mark.sweep
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_that_of_a_microbatch():
    import subprocess

    def added(rows, size=0):
        command = [sys.executable, "-c", MEMORY, str(rows), str(size)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    small, full, split = added(16), added(256), added(256, 16)
    print(f"small {small:.0f} MB, full {full:.0f} MB, split {split:.0f} MB")
    assert split < 1.5 * small + 10
    assert split < full / 4
