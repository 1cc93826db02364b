"""On PyTorch, what is around an update, a trial and a call: gradients, Python, random numbers."""

import gc
import importlib
import itertools
import random
import types
import weakref
from collections import deque

import keras
import numpy as np
import pytest
from helpers import ROOT, Applies, assert_close, dense_data, dense_model, seeded, sequential, told
from keras import layers, ops
from of_torch import Own, Step, model_of, torch
from training import compiled, train

from ga_model import AccumulatingModel, AccumulationScheduler
from ga_model.backends.torch import layer_calls
from ga_model.base._python_state import PythonState
from ga_model.core import recorder


def fit(model, rows=4, samples=24, **kwargs):
    model.fit(*dense_data(samples), batch_size=rows, shuffle=False, verbose=0, **kwargs)
    return model


def test_user_code_between_batches_does_not_touch_the_window():
    """`.grad` is the user's between batches: cleared, filled, and read."""

    class Meddling(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert all(v.value.grad is None for v in self.model.trainable_weights)
            ops.sum(self.model(dense_data(3)[0])).backward()
            if batch % 2:
                self.model.zero_grad()

    start = seeded(dense_model).get_weights()
    reference = fit(compiled(), 12, 31)
    model = fit(compiled(accumulation_steps=3), 4, 31, callbacks=[Meddling()])
    assert_close(model, reference, start)


def test_gradients_are_the_sum_and_cost_no_buffer():
    class Noting(AccumulatingModel, keras.Sequential):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none)
            sums.append([v.value.grad for v in self.trainable_weights])

    sums = []
    model = compiled(lambda: Noting([keras.Input((4,)), *dense_model().layers]), microbatch_size=3)
    model.train_on_batch(*dense_data(12))  # the first one is tried before
    sums.clear()
    model.train_on_batch(*dense_data(12))
    assert len(sums) == 4
    assert all(gradient is None for gradient in sums[0])
    for ones, others in itertools.pairwise(sums[1:]):
        assert all(a is b for a, b in zip(ones, others))


# What is kept, and for how long.


class TwoViews(Step):
    def forward_loss(self, x, y):
        a, b = (self(view, training=True) for view in (x, x.flip(1)))
        return -torch.log_softmax(a @ b.T, 1).diagonal().mean()


KEPT = []  # weak references


def noted(x):
    result = x * 1.0
    if torch.is_grad_enabled() and result.requires_grad:
        KEPT.append(weakref.ref(result))
    return result


@pytest.mark.parametrize(
    ("kind", "base", "settings", "number"),
    [
        (recorder.Recording, keras.Sequential, {"microbatch_size": 3}, 8),
        (layer_calls.Microbatches, TwoViews, {"microbatch_size": 5}, 4),
    ],
)
def test_nothing_of_a_step_is_kept(monkeypatch, kind, base, settings, number):
    """No recording, call or output outlives its microbatch, to wait for the garbage collector."""
    original, objects = kind.__init__, []

    def noting(self, *args, **kwargs):
        original(self, *args, **kwargs)
        objects.append(weakref.ref(self))

    monkeypatch.setattr(kind, "__init__", noting)
    loss = "mse" if base is keras.Sequential else None
    make = model_of(base, lambda: Applies(noted))
    model = compiled(make, loss, accumulation_steps=1, **settings)
    data = [torch.as_tensor(part) for part in dense_data(12)]  # which a step gets as they are
    model.train_on_batch(*data)
    gc.collect()
    gc.disable()
    try:
        KEPT.clear(), objects.clear()
        for _ in range(2):
            model.train_on_batch(*data)
        assert len(objects) == number
        assert KEPT
        assert not [thing for thing in (*KEPT, *objects) if thing() is not None]
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
    state.restore()
    assert (model.seen, model.by_name, hasattr(model, "last")) == ([], {"all": [1]}, False)
    assert model.layers[0]._losses == []
    model.by_name = {}
    assert [name for _, name, _ in state.changed()] == ["by_name"]


# Trying: what Python keeps is put back, and what changes later is told of.


class KeepsList(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="kept")
        self.values = []

    def update_state(self, y, z, sample_weight=None):
        self.values.append(float(ops.mean(ops.abs(y - z))))

    def result(self):
        return float(np.median(self.values))

    def reset_state(self):
        self.values = []


class KeepsAll(Step):
    """Keeps what it has seen in Python, and draws random numbers."""

    def begin(self):
        self.seen, self.by_name, self.last = set(), {"all": []}, deque(maxlen=3)
        self.kept, self.drawn = KeepsList(), []

    def forward_loss(self, x, y):
        self.seen.add(len(self.seen))
        self.by_name["all"].append(len(self.seen))
        self.last.append(len(self.seen))
        draws = [random.random(), np.random.rand(), torch.rand(()), keras.random.uniform(())]
        self.drawn.append([float(number) for number in draws])
        z = self(x, training=True)
        self.kept.update_state(y, z.detach())
        return torch.square(z - y).mean()


class Ruled(AccumulatingModel, KeepsAll):
    def microbatch_weight(self, x, y=None, sample_weight=None):
        return len(x)


@pytest.mark.filterwarnings("ignore:The metric:UserWarning")
def test_trying_leaves_no_trace_in_python():
    tried, ruled = (
        fit(compiled(model_of(base), None, accumulation_steps=2), samples=16)
        for base in (KeepsAll, Ruled)
    )
    assert (tried.seen, len(tried.kept.values)) == ({0, 1, 2, 3}, 4)
    assert (tried.by_name["all"], list(tried.last)) == ([1, 2, 3, 4], [2, 3, 4])
    assert tried.drawn == ruled.drawn


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


def test_what_is_written_later_is_told_where_it_is_seen():
    first = layers.Dense(5, trainable=False)
    first.build((None, 4))
    late = WritesOnce(first.kernel)
    parts = [keras.Input((4,)), first, late, layers.Dense(2)]
    model = compiled(lambda: keras.Sequential(parts), accumulation_steps=3)
    changing = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: setattr(late, "is_due", batch == 9)
    )
    with pytest.warns(UserWarning, match=f"(?s){first.kernel.path}.*once per microbatch") as caught:
        fit(model, samples=72, callbacks=[changing])
    assert len(told(caught)) == 1


# Calls of layers.


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
    with pytest.warns(UserWarning, match="calls no layer that can be split into microbatches"):
        fit(compiled(NetInAnObject, None, microbatch_size=5), 12)


def test_random_layers_draw_for_each_microbatch():
    drawn = []

    def noting(x):
        drawn.append(ops.convert_to_numpy(ops.cast(x == 0, "int32")))
        return x

    parts = layers.Dropout(0.5), Applies(noting), layers.Dense(2)
    model = compiled(lambda: sequential((40,), *parts), microbatch_size=4)
    for _ in range(2):  # the first one is tried before
        drawn.clear()
        model.train_on_batch(np.ones((12, 40), "float32"), dense_data(12)[1])
    assert len(drawn) == 3
    assert all(np.any(a != b) for a, b in itertools.pairwise(drawn))


# Autocast.


def under_autocast(self, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = self(x, training=True)
    return torch.square(outputs.float() - y).mean()


def all_under_autocast(self, data):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Step.train_step(self, data)


NOTED = set()


class Notes(layers.Dense):
    def call(self, x):
        if x.device.type != "meta":  # to be built
            NOTED.add((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return super().call(x)


@pytest.mark.parametrize(
    "methods", [{"forward_loss": under_autocast}, {"train_step": all_under_autocast}]
)
def test_autocast_is_that_of_the_call(methods):
    base = type("UnderAutocast", (Step,), methods)

    def trained(rows=12, first=layers.Dense, **settings):
        def make():
            return base([keras.Input((4,)), first(5, activation="tanh"), layers.Dense(2)])

        def compile_args():
            return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}

        return train(make, compile_args, dense_data(24), rows=rows, **settings)

    NOTED.clear()
    expected, start = trained()
    # Gradients of microbatches are rounded to bfloat16, each of them.
    assert_close(trained(first=Notes, microbatch_size=5)[0], expected, start, 2**-8)
    assert {(True, torch.bfloat16)} == NOTED
    assert_close(trained(4, accumulation_steps=3)[0], expected, start, 2e-2)


# Optimizers of `torch.optim`.


def of_torch(base=Own, rows=12, **settings):
    """Return a model that was trained, and the weights that it began with."""
    return train(model_of(base), dict, dense_data(31), rows=rows, epochs=3, **settings)


WINDOWS = {"rows": 4, "accumulation_steps": 3}


def test_the_state_of_torch_optim_and_the_last_gradients_are_those_of_plain_training():
    (model, _), (expected, _) = of_torch(**WINDOWS), of_torch()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        states = [m.of_torch.state[p] for m, p in ((model, mine), (expected, other))]
        assert states[0].keys() == states[1].keys()
        for name, value in states[1].items():
            torch.testing.assert_close(states[0][name], value, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert "step" not in vars(model.of_torch)


def test_a_size_is_found_for_torch_optim():
    assert of_torch(microbatch_size="auto")[0].microbatch_size == 12


def test_updates_of_torch_optim_are_counted():
    """By callbacks, which would see none, and not in trials."""
    seen = []
    own = keras.callbacks.Callback()
    own.on_update_end = lambda number, logs=None: seen.append(number)
    scheduler = AccumulationScheduler(lambda number: 2 if number < 2 else 4, by="update")
    model = compiled(model_of(Own), accumulation_steps=2)
    fit(model, samples=48, callbacks=[scheduler, own])
    assert seen == [1, 2, 3, 4]


# Memory, by the script of the documents.


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    script = importlib.import_module("measure_torch")

    def measure(name, way):
        (found,) = [whole for whole in script.WAYS if whole.startswith(way)]
        return script.in_process(script.measure_memory, name, found)

    return measure


@pytest.mark.sweep
def test_peak_memory_is_near_that_of_plain_small_batches(measured):
    plain = measured("deep", "plain Keras, batches of 32")
    weights = 20 * 1024 * 1024 * 4 / 1e6
    assert measured("deep", "accumulation_steps") < plain + 0.15 * weights
    assert measured("deep", "microbatch_size") < plain + 0.15 * weights
    assert measured("deep", "Keras's") > plain + weights  # the control


@pytest.mark.sweep
def test_activations_are_those_of_a_microbatch(measured):
    plain, full = (measured("convolution", f"plain Keras, batches of {n}") for n in (32, 256))
    assert full > 3 * plain
    assert measured("convolution", "microbatch_size") < 1.2 * plain
    assert measured("convolution", "the same, loss_over") < 1.2 * plain
