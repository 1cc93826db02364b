"""On PyTorch, a `train_step` of one's own is heard as it takes gradients and applies them."""

import contextlib
import random
from collections import deque

import keras
import numpy as np
import pytest
from ga_model.torch_engine._divisors import Divided
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
    relative_difference,
    seeded,
)
from keras import layers, ops
from torch_step import torch
from training import assert_equal_logs, difference_of_fits, train

from ga_model import AccumulatingModel, accumulate

WAYS = {
    "both": {"rows": 4, "steps": 3, "size": 3},
    "steps": {"rows": 4, "steps": 3},
    "size": {"rows": 12, "size": 5},
}


class Own(keras.Sequential):
    """As in Keras's guide to steps of one's own on PyTorch."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        y_pred = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        self.take(loss)
        with torch.no_grad():
            self.update()
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def take(self, loss):
        loss.backward()

    def update(self):
        weights = self.trainable_weights
        self.optimizer.apply([v.value.grad for v in weights], weights)


class Scaled(Own):
    def take(self, loss):
        self.optimizer.scale_loss(loss).backward()


class ByFunction(Own):
    def take(self, loss):
        self.gradients = torch.autograd.grad(loss, [v.value for v in self.trainable_weights])

    def update(self):
        self.optimizer.apply(list(self.gradients), self.trainable_weights)


class Differentiable(Own):
    """Its gradients could be differentiated once more."""

    def take(self, loss):
        weights = [v.value for v in self.trainable_weights]
        self.gradients = torch.autograd.grad(loss, weights, create_graph=True)

    def update(self):
        self.optimizer.apply([g.detach() for g in self.gradients], self.trainable_weights)


class Copies(Own):
    """Applies copies of gradients."""

    def update(self):
        weights = self.trainable_weights
        self.optimizer.apply([v.value.grad.clone() for v in weights], weights)


class InPairs(Own):
    def update(self):
        weights = self.trainable_weights
        self.optimizer.apply_gradients([(v.value.grad, v) for v in weights])


class Calling(Own):
    def train_step(self, data):
        return keras.Sequential.train_step(self, data)


def make_of(kind):
    return lambda: kind([keras.Input((4,)), *dense_model().layers])


def arguments():
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"]}


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind", [Own, Scaled, ByFunction, InPairs, Calling, Differentiable, Copies]
)
def test_own_steps_match_the_full_batch(kind, way):
    found = difference_of_fits(make_of(kind), arguments, dense_data(31), **WAYS[way])
    assert found <= LIMIT


def test_an_own_step_logs_the_full_batch():
    data = dense_data(24)
    model, _ = train(make_of(Own), arguments, data, rows=12, microbatch_size=5)
    reference, _ = train(make_of(Own), arguments, data, rows=12)
    assert_equal_logs(model, reference)


class OwnLoss(Own):
    """What the step takes the gradient of comes from no `compute_loss`."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ops.mean(ops.square(self(x, training=True) - y))
        self.take(loss)
        self.update()
        return {"loss": loss}


class MoreThanComputed(Own):
    def take(self, loss):
        (loss + 0.1 * ops.sum(ops.square(self.trainable_weights[0]))).backward()


class Clipping(Own):
    def update(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        super().update()


class Changing(Own):
    def update(self):
        weights = self.trainable_weights
        self.optimizer.apply([2.0 * v.value.grad for v in weights], weights)


class ByData(Own):
    """Writes to gradients past PyTorch's count."""

    def update(self):
        for v in self.trainable_weights:
            v.value.grad.data.add_(0.1 * v.value.data)
        super().update()


class ClampsLater(Own):
    """The same, where it first changes something after some batches."""

    num_batches = 0

    def update(self):
        self.num_batches = self.num_batches + 1
        if self.num_batches > 4:
            for v in self.trainable_weights:
                v.value.grad.data.clamp_(-0.001, 0.001)
        super().update()


class Twice(Own):
    def update(self):
        super().update()
        super().update()


class Never(Own):
    def update(self):
        pass


class ByHand(Own):
    def update(self):
        for v in self.trainable_weights:
            v.value.sub_(0.1 * v.value.grad)


class ClipsWeights(Own):
    """As the first GANs with a Wasserstein distance do."""

    def update(self):
        super().update()
        for v in self.trainable_weights:
            v.assign(ops.clip(v, -0.1, 0.1))


class ClipsByData(Own):
    def update(self):
        super().update()
        for v in self.trainable_weights:
            v.value.data.clamp_(-0.1, 0.1)


class OfOwnLossClips(ClipsByData):
    def train_step(self, data):
        return OwnLoss.train_step(self, data)


class ByOneOfOthers(Own):
    def update(self):
        elsewhere["optimizer"].apply([v.value.grad for v in self.trainable_weights])


class ByGlobalName(Own):
    def update(self):
        first, *others = self.trainable_weights
        self.optimizer.apply([first.value.grad], [first])
        elsewhere["optimizer"].apply([v.value.grad for v in others], others)


elsewhere = {"optimizer": None}


class TwoLosses(Own):
    def take(self, loss):
        x, y = dense_data(4)
        self.compute_loss(x=x, y=y, y_pred=self(x)).backward()
        loss.backward()


class OfTorch(Own):
    def update(self):
        self.own = torch.optim.SGD(self.parameters(), 0.1)
        self.own.step()


class ComputesLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y_pred - y))


class OfSamples(Own):
    """Takes the gradient of `loss_of` what the model gives, whose samples some cases compare."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.loss_of(self(x, training=True), y)
        self.take(loss)
        self.update()
        return {"loss": loss.detach()}


class Summed(OfSamples):
    def loss_of(self, z, y):
        return 0.1 * torch.square(z - y).sum()


class Root(OfSamples):
    def loss_of(self, z, y):
        return torch.square(z - y).mean().sqrt()


class Compares(OfSamples):
    def loss_of(self, z, y):
        return torch.logsumexp(z @ z.T, 1).mean()


class Masked(OfSamples):
    def loss_of(self, z, y):
        mask = (y[:, 0] > 0).float()
        return (mask * torch.square(z - y).mean(1)).sum() / (mask.sum() + 0.1)  # no sum itself


class Penalized(OfSamples):
    """Its step takes the gradient of a gradient."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        x = x.clone().requires_grad_()
        z = self(x, training=True)
        (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        (torch.square(z - y).mean() + torch.square(slope.norm(dim=1) - 1.0).mean()).backward()
        self.update()
        return {}


class SumOfOwn(ComputesLoss):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.1 * ops.sum(ops.square(y_pred - y))


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [{"microbatch_size": "auto"}, {"microbatch_size": 1}, {}])
@pytest.mark.parametrize("kind", [OwnLoss, Summed, Compares])
def test_single_samples_are_tried_in_pairs(kind, settings):
    """Those of an epoch, and of the batches of one sample that `auto` tries first."""
    rows = 4 if settings else 1
    model = accumulate(seeded(make_of(kind)), accumulation_steps=12 // rows, **settings)
    reference = seeded(make_of(kind))
    data = [part[:24] for part in dense_data(24)]
    start = model.get_weights()
    for each, size in ((reference, 12), (model, rows)):
        each.compile(keras.optimizers.SGD(0.1))
        refused = pytest.raises(RuntimeError, match="neither those of a mean nor of a sum")
        # With a size its step sees the batches of a window whole, which are no sum of theirs.
        with refused if each is model and kind is Compares else contextlib.nullcontext():
            each.fit(*data, batch_size=size, shuffle=False, verbose=0)
    if kind is not Compares:
        difference = relative_difference(model.get_weights(), reference.get_weights(), start)
        assert difference <= LIMIT


def test_normalization_does_not_hide_a_mean():
    def make():
        return OwnLoss([keras.Input((4,)), layers.BatchNormalization(), *dense_model().layers])

    model = accumulate(make(), accumulation_steps=2)
    model.compile("sgd")
    with pytest.warns(UserWarning, match="BatchNormalization layers in training mode"):
        model.fit(*dense_data(16), batch_size=4, verbose=0)
    assert model._accumulation.step_probe.kind == Divided(0, 2.0)


class Drops(OwnLoss):
    """Has layers that draw."""

    def __init__(self, parts):
        noise = [layers.Dropout(0.3, seed=1), layers.GaussianNoise(0.1, seed=2)]
        super().__init__([*parts[:-1], *noise, parts[-1]])


class DifferentiableMean(Differentiable):
    def train_step(self, data):
        return OwnLoss.train_step(self, data)


TRIED = [
    DifferentiableMean,
    OwnLoss,
    MoreThanComputed,
    TwoLosses,
    Summed,
    Penalized,
    ComputesLoss,
    SumOfOwn,
]


@pytest.mark.every_case
@pytest.mark.parametrize("way", ["steps", "both"])
@pytest.mark.parametrize("kind", TRIED)
def test_what_a_step_of_ones_own_averages_over_is_found_by_trying(kind, way):
    found = difference_of_fits(make_of(kind), arguments, dense_data(31), **WAYS[way])
    assert found <= LIMIT


@pytest.mark.parametrize("way", ["steps", "both"])
def test_gradients_of_a_sum_beside_regularizers_may_be_differentiable(way):
    def make():
        first = layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1))
        return Differentiable([keras.Input((4,)), first, layers.Dense(2)])

    def of_sum():
        loss = keras.losses.MeanSquaredError(reduction="sum")
        return {"optimizer": keras.optimizers.SGD(0.01), "loss": loss}

    assert difference_of_fits(make, of_sum, dense_data(31), **WAYS[way]) <= LIMIT


def test_trying_leaves_no_trace():
    """Random numbers and metrics are those of a step that says what it averages over."""

    def train_one(base):
        model = accumulate(seeded(make_of(base)), accumulation_steps=2)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(*dense_data(16), batch_size=4, shuffle=False, verbose=0)
        return model.get_weights(), model._accumulation.step_probe.kind

    (tried, kind), (told, no_kind) = train_one(Drops), train_one(ruled(Drops))
    assert (kind, no_kind) == (Divided(0, 2.0), None)
    for a, b in zip(tried, told, strict=True):
        np.testing.assert_array_equal(a, b)


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


class KeepsAll(keras.Sequential):
    """Keeps what it has seen in Python, and draws random numbers."""

    def __init__(self, parts):
        super().__init__(parts)
        self.seen, self.by_name, self.last = set(), {"all": []}, deque(maxlen=3)
        self.kept, self.drawn = KeepsList(), []

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        self.seen.add(len(self.seen))
        self.by_name["all"].append(len(self.seen))
        self.last.append(len(self.seen))
        draws = [random.random(), np.random.rand(), torch.rand(()), keras.random.uniform(())]
        self.drawn.append([float(number) for number in draws])
        z = self(x, training=True)
        loss = ops.mean(ops.square(z - y))
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_weights])
        self.kept.update_state(y, z.detach())
        return {"loss": loss.detach()}


@pytest.mark.filterwarnings("ignore:The metric:UserWarning")
def test_trying_leaves_no_trace_in_python():
    def train_one(base):
        model = accumulate(seeded(make_of(base)), accumulation_steps=2)
        model.compile(keras.optimizers.SGD(0.1))
        model.fit(*dense_data(16), batch_size=4, shuffle=False, verbose=0)
        return model

    tried, told = train_one(KeepsAll), train_one(ruled(KeepsAll))
    assert (tried.seen, len(tried.kept.values)) == ({0, 1, 2, 3}, 4)
    assert (tried.by_name["all"], list(tried.last)) == ([1, 2, 3, 4], [2, 3, 4])
    assert tried.drawn == told.drawn


def test_a_step_that_is_no_mean_any_more_later_is_an_error():
    x, y = dense_data(32)
    y = np.abs(y)
    y[24:] *= np.sign(np.arange(8) % 3 - 0.5)[:, None]

    class TakesRoots(OfSamples):
        def loss_of(self, z, y):
            loss = torch.square(z - y).mean()
            return torch.sqrt(loss) if (y < 0).any() else loss

    model = accumulate(make_of(TakesRoots)(), accumulation_steps=2)
    model.compile("sgd")
    with pytest.raises(RuntimeError, match="neither those of a mean nor of a sum"):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


REFUSED = {
    Root: (RuntimeError, "neither those of a mean nor of a sum"),
    Compares: (RuntimeError, "neither those of a mean nor of a sum"),
    Masked: (RuntimeError, "neither those of a mean nor of a sum"),
    Clipping: (RuntimeError, "by clipping for example"),
    Changing: (RuntimeError, "by clipping for example"),
    ByData: (RuntimeError, "by clipping for example"),
    Twice: (RuntimeError, "applies 'SGD' twice"),
    ByGlobalName: (RuntimeError, "if its optimizers are attributes of the model"),
    ByOneOfOthers: (RuntimeError, "which applies .*, reached by a global variable"),
    Never: (RuntimeError, "applies none in this batch"),
    ByHand: (RuntimeError, "writes to .*kernel.* itself, by clipping or updating them by hand"),
    ClipsWeights: (RuntimeError, "writes to .*kernel.* itself, by clipping or updating"),
    ClipsByData: (RuntimeError, "writes to .*kernel.* itself, by clipping or updating"),
    OfOwnLossClips: (RuntimeError, "writes to .*kernel.* itself, by clipping or updating"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", REFUSED)
def test_steps_that_cannot_be_accumulated_are_refused(kind):
    error, words = REFUSED[kind]
    elsewhere["optimizer"] = keras.optimizers.SGD(0.1)
    model = accumulate(make_of(kind)(), accumulation_steps=3)
    elsewhere["optimizer"].build(model.trainable_variables)
    model.compile(keras.optimizers.SGD(0.1, name="SGD"), "mse")
    with pytest.raises(error, match=words) as caught:
        model.fit(*dense_data(12), batch_size=6, verbose=0)
    assert "Received: " in str(caught.value)
    assert all(v.value.grad is None for v in model.trainable_weights)
    assert model.has_updated


class ClipsAfterUpdate(Own):
    """What it clips was not that large before the first update."""

    def update(self):
        super().update()
        for v in self.trainable_weights:
            v.value.data.clamp_(-2.0, 2.0)


def test_weights_that_are_clipped_when_an_update_made_them_large_are_refused():
    model = accumulate(make_of(ClipsAfterUpdate)(), accumulation_steps=2)
    model.compile(keras.optimizers.SGD(10.0), "mse")
    with pytest.raises(RuntimeError, match=r"writes to .* itself, by clipping or updating"):
        model.fit(*dense_data(24), batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.filterwarnings("ignore:.*the attribute `num_batches`:UserWarning")
def test_gradients_that_are_changed_after_some_batches_are_refused():
    model = accumulate(make_of(ClampsLater)(), accumulation_steps=2)
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="by clipping for example"):
        model.fit(*dense_data(24), batch_size=4, verbose=0)
    assert model.num_batches == 5


@pytest.mark.every_case
@pytest.mark.parametrize("kind", [*(kind for kind in REFUSED if kind is not Never), OfTorch])
def test_they_are_exact_where_batches_are_split(kind):
    def make():
        elsewhere["optimizer"] = keras.optimizers.SGD(0.1)
        model = make_of(kind)()
        weights = model.trainable_variables
        elsewhere["optimizer"].build(weights[1:] if kind is ByGlobalName else weights)
        return model

    assert difference_of_fits(make, arguments, dense_data(31), **WAYS["size"]) <= LIMIT


def test_optimizers_of_torch_are_refused_in_windows():
    model = make_of(OfTorch)()
    model.own = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    model = accumulate(model, accumulation_steps=3)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"has an optimizer of `torch\.optim`"):
        model.fit(*dense_data(12), batch_size=6, verbose=0)


def ruled(kind):
    class Ruled(AccumulatingModel, kind):
        def microbatch_weight(self, x, y=None, sample_weight=None):
            return len(x)

    return Ruled


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [OwnLoss, ComputesLoss, DifferentiableMean])
def test_a_rule_of_ones_own_makes_them_exact(kind, way):
    found = difference_of_fits(make_of(ruled(kind)), arguments, dense_data(31), **WAYS[way])
    assert found <= LIMIT


class Adversarial(keras.Model):
    """Two optimizers, each with its own loss, of weights as they are before both updates."""

    def __init__(self):
        super().__init__()
        self.one, self.other = dense_model(), dense_model()
        self.one_optimizer, self.other_optimizer = (keras.optimizers.Adam(0.01) for _ in range(2))

    def call(self, x):
        return self.one(x)

    def train_step(self, data):
        x, y = data
        for part, optimizer, target in (
            (self.one, self.one_optimizer, y),
            (self.other, self.other_optimizer, -y),
        ):
            self.zero_grad()
            loss = ops.mean(ops.square(part(x) - target))
            loss.backward()
            weights = part.trainable_weights
            optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
def test_several_optimizers_match_the_full_batch(way):
    weights = {}
    data = dense_data(31)
    settings = {"accumulation_steps": WAYS[way].get("steps", 1)}
    settings["microbatch_size"] = WAYS[way].get("size")
    for name, given in (("plain", {}), ("accumulated", settings)):
        keras.utils.set_random_seed(1)
        model = ruled(Adversarial)()
        model(data[0][:1]), model.other(data[0][:1])
        start = model.get_weights()
        model.compile(**given)
        rows = WAYS[way]["rows"] if given else 12
        model.fit(*data, batch_size=rows, epochs=2, shuffle=False, verbose=0)
        weights[name] = model.get_weights()
    assert relative_difference(weights["accumulated"], weights["plain"], start) <= 1e-4
    assert int(model.one_optimizer.iterations) == 6


class TogetherAtLast(Adversarial):
    """Takes all gradients before the first update."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        pairs = [(self.one, y), (self.other, -y)]
        loss = sum(ops.mean(ops.square(part(x) - target)) for part, target in pairs)
        loss.backward()
        for part, optimizer in ((self.one, self.one_optimizer), (self.other, self.other_optimizer)):
            weights = part.trainable_weights
            optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


def test_several_optimizers_whose_gradients_come_first_are_not_told_of():
    model = ruled(TogetherAtLast)()
    model.compile(accumulation_steps=2)
    model.fit(*dense_data(8), batch_size=4, verbose=0)
    assert [int(o.iterations) for o in (model.one_optimizer, model.other_optimizer)] == [1, 1]


class InTurns(Adversarial):
    """One part learns from the other, which was updated before: by its values, or its counter."""

    by_counter = False

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        ops.mean(ops.square(self.one(x) - y)).backward()
        weights = self.one.trainable_weights
        self.one_optimizer.apply([v.value.grad for v in weights], weights)
        learned = self.one_optimizer.iterations * y if self.by_counter else self.one(x).detach()
        loss = ops.mean(ops.square(self.other(x) - learned))
        loss.backward()
        weights = self.other.trainable_weights
        self.other_optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


class InTurnsByCounter(InTurns):
    by_counter = True


@pytest.mark.parametrize("steps", [InTurns, InTurnsByCounter])
def test_several_optimizers_are_told_of(steps):
    model = ruled(steps)()
    model.compile(accumulation_steps=2)
    with pytest.warns(UserWarning, match="which applies several"):
        model.fit(*dense_data(8), batch_size=4, verbose=0)


class OfSum(Own):
    """Logs what it takes the gradient of, which is a sum, in three ways."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ops.sum(ops.square(self(x, training=True) - y))
        loss.backward()
        self.update()
        return {"tensor": loss, "detached": loss.detach(), "number": loss.item()}


def test_sums_are_logged_as_sums():
    class Ruled(AccumulatingModel, OfSum):
        def microbatch_weight(self, x, y=None, sample_weight=None):
            return "sum"

    logs = []
    for settings in ({}, {"microbatch_size": 5}):
        model = seeded(make_of(Ruled))
        model.compile(keras.optimizers.SGD(0.001), **settings)
        history = model.fit(*dense_data(24), batch_size=12, shuffle=False, verbose=0).history
        logs.append([history[name][0] for name in ("tensor", "detached", "number")])
    np.testing.assert_allclose(logs[1], logs[0], rtol=1e-6)


class Counting(Own):
    def __init__(self, *args):
        super().__init__(*args)
        self.count = self.add_weight(name="count", trainable=False)

    def update(self):
        self.count.assign_add(1.0)
        super().update()


def test_what_a_step_writes_once_per_microbatch_is_told():
    model = accumulate(make_of(Counting)(), accumulation_steps=2)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="writes to .*count"):
        model.fit(*dense_data(8), batch_size=4, verbose=0)


class WritesLater(Own):
    """Begins to write to a variable, a tensor and an attribute after some batches."""

    num_rounds = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.target = self.add_weight(name="target", shape=(2,), trainable=False)
        self.kept = torch.zeros(2)

    def update(self):
        super().update()
        if int(self.optimizer.iterations) > 0:
            self.target.assign(self.trainable_weights[-1])
            self.kept += 1.0
            self.num_rounds = self.num_rounds + 1
        self.largest = max(float(v.value.abs().max()) for v in self.trainable_weights[:1])


def test_what_a_step_starts_to_write_later_is_told_once():
    model = accumulate(make_of(WritesLater)(), accumulation_steps=2)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="writes to") as told:
        model.fit(*dense_data(24), batch_size=4, verbose=0)
    texts = [str(warning.message) for warning in told]
    first, later = (text for text in texts if "writes to" in text)
    assert "`largest`" in first
    assert "target" not in first
    for name in ("target", "the tensor `kept`", "the attribute `num_rounds`"):
        assert name in later


def test_other_threads_are_not_listened_to():
    backward, grad = torch.autograd.backward, torch.autograd.grad
    model = accumulate(make_of(Own)(), accumulation_steps=2)
    model.compile("sgd", "mse")
    model.fit(*dense_data(8), batch_size=4, verbose=0)
    assert torch.autograd.backward is backward
    assert torch.autograd.grad is grad


class OfKeras(AccumulatingModel, keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = dense_model()

    def call(self, x):
        return self.layer(x)


class Derived(OfKeras):
    """Inherits the mixin from a class of the user's own."""


class DerivedTwice(Derived):
    """The same once more."""


@pytest.mark.every_case
@pytest.mark.parametrize("made", [OfKeras, Derived, DerivedTwice])
def test_a_class_may_inherit_the_mixin(made):
    def of(microbatch_size):
        model = seeded(made)
        model.compile(keras.optimizers.SGD(0.1), "mse", microbatch_size=microbatch_size)
        start = model.get_weights()
        model.fit(*dense_data(12), batch_size=6, shuffle=False, verbose=0)
        return model.get_weights(), start

    (weights, start), (reference, _) = of(4), of(None)
    assert relative_difference(weights, reference, start) <= LIMIT
