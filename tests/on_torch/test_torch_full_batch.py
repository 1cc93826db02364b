"""On PyTorch, any step is exact with `microbatch_size`: it runs on the full batch.

Its calls of layers go by microbatches, forward and again backward. Nothing else is told of it.
"""

import gc
import subprocess
import sys
import types
import weakref

import keras
import pytest
from helpers import dense_data, dense_model, seeded
from keras import layers
from torch_step import Step, torch

from ga_model import accumulate
from ga_model.backends.torch import layer_calls
from ga_model.backends.torch.adapter import TorchBackend
from ga_model.base._call_again import PythonState
from ga_model.core.layer_calls import LayerCall
from ga_model.core.proof.calls import NotByRowsError


def fit(make, rows=31):
    model = accumulate(seeded(make), microbatch_size=5)
    model.compile(keras.optimizers.SGD(0.1))
    model.fit(*dense_data(rows), batch_size=12, epochs=2, shuffle=False, verbose=0)


def of(base, *parts):
    return lambda: base([keras.Input((4,)), *(part() for part in parts), layers.Dense(2)])


class Counting(layers.Dense):
    seen = None

    def call(self, x):
        if not keras.src.backend.common.symbolic_scope.in_symbolic_scope():
            Counting.seen.append(len(x))
        return super().call(x)


class TwoViews(Step):
    def forward_loss(self, x, y):
        a, b = (self(view, training=True) for view in (x, x.flip(1)))
        return -torch.log_softmax(a @ b.T, 1).diagonal().mean()


def test_no_layer_sees_more_samples_than_a_microbatch():
    Counting.seen = []
    fit(of(TwoViews, lambda: Counting(3)), rows=12)
    # It is built by two, and tried on up to five. Then two views go forward, and back.
    assert max(Counting.seen) == 5
    assert Counting.seen[-24:] == [5, 5, 2] * 8


class OfTorch(layers.Layer):
    """Draws by PyTorch itself."""

    def call(self, x, training=False):
        return torch.nn.functional.dropout(x, 0.5, training=bool(training))


def test_numbers_that_pytorch_draws_are_the_same_in_both_passes():
    class Draws(keras.Sequential):
        def train_step(self, data):
            self.zero_grad()
            outputs = self(data[0], training=True)
            outputs.sum().backward()
            bias = self.layers[0].bias
            # The gradient of a bias counts what was not dropped, each twice.
            assert torch.equal(bias.value.grad, 2.0 * (outputs != 0).sum(0))
            self.optimizer.apply([bias.value.grad], [bias])
            return {}

    fit(lambda: Draws([keras.Input((4,)), layers.Dense(6), OfTorch()]))


class NetInAnObject(keras.Model):
    """Keeps its network where the model does not look for layers."""

    def __init__(self):
        super().__init__()
        self.holder = types.SimpleNamespace(net=dense_model())

    def call(self, x):
        return self.holder.net(x)

    def train_step(self, data):
        self.holder.net.zero_grad()
        x, y = data
        torch.sqrt(torch.square(self.holder.net(x) - y).mean()).backward()
        for weight in self.holder.net.trainable_weights:  # which the model's optimizer has not
            weight.assign(weight - 0.1 * weight.value.grad)
        return {}


def test_a_step_in_which_no_call_is_split_is_told_of():
    with pytest.warns(UserWarning, match="No call of a layer goes by microbatches in"):
        fit(NetInAnObject)


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


def test_what_a_call_holds_is_gone_with_its_outputs(monkeypatch):
    kept = []
    original = layer_calls.Microbatches.__init__

    def noting(self, *args):
        original(self, *args)
        kept.append(weakref.ref(self))

    monkeypatch.setattr(layer_calls.Microbatches, "__init__", noting)
    gc.disable()
    try:
        fit(of(TwoViews, lambda: layers.Dense(3)))
        assert len(kept) == 12  # two calls in each of six steps
        assert [call() for call in kept] == [None] * 12
    finally:
        gc.enable()


def test_what_is_put_back_costs_little_where_keras_keeps_nothing():
    """A layer of Keras has more than 20 lists and dicts, most of which are empty."""
    model = keras.Sequential([keras.Input((4,)), *[layers.Dense(4) for _ in range(9)]])
    model.seen, model.by_name = [], {"all": [1]}
    state = PythonState(model)
    assert len(state._contents) < 12 * len(model.layers)
    assert not list(state.changed())
    model.seen.append(1)
    model.by_name["all"].append(2)
    model.layers[0]._losses.append(3)
    assert [name for _, name, _ in state.changed()] == ["seen", "_losses"]
    model.by_name["other"] = []
    model.last = 4
    assert [name for _, name, _ in state.changed()] == ["seen", "by_name", "last", "_losses"]
    state.put_back()
    assert (model.seen, model.by_name, hasattr(model, "last")) == ([], {"all": [1]}, False)
    assert model.layers[0]._losses == []
    model.by_name = {}
    assert [name for _, name, _ in state.changed()] == ["by_name"]


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
    def added(rows, size=0):
        command = [sys.executable, "-c", MEMORY, str(rows), str(size)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    small, full, split = added(16), added(256), added(256, 16)
    print(f"small {small:.0f} MB, full {full:.0f} MB, split {split:.0f} MB")
    assert split < 1.5 * small + 10
    assert split < full / 4
