"""On PyTorch, a `train_step` of one's own is heard as it takes gradients and applies them."""

import random
import re
import warnings
from collections import deque

import keras
import numpy as np
import pytest
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

UNLIKE = "A window of microbatches does not train as the full batch"


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
@pytest.mark.parametrize("way", ["both", "size"])
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


def texts_of(caught):
    """Return the texts of the warnings that users are to read."""
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def difference_and_texts(make, data, *, rows, compile_args=arguments, **settings):
    """Return the difference from training on batches of 12 samples, and the warnings."""
    reference, start = train(make, compile_args, data, rows=12, epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model, _ = train(make, compile_args, data, rows=rows, epochs=1, **settings)
    difference = relative_difference(model.get_weights(), reference.get_weights(), start)
    return difference, texts_of(caught)


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [{"microbatch_size": "auto"}, {}])
@pytest.mark.parametrize("kind", [OwnLoss, Summed, Compares])
def test_single_samples_are_tried_with_others(kind, settings):
    """Those of an epoch, and of the batches of one sample that `auto` tries first."""
    rows = 4 if settings else 1
    settings["accumulation_steps"] = 12 // rows
    found, told = difference_and_texts(make_of(kind), dense_data(24), rows=rows, **settings)
    if kind is Compares:
        assert found > 0.01
        assert [text.partition(".")[0] for text in told] == [UNLIKE]
    else:
        assert found <= LIMIT
        assert told == []


def test_normalization_does_not_hide_a_mean():
    def make():
        return OwnLoss([keras.Input((4,)), layers.BatchNormalization(), *dense_model().layers])

    _, told = difference_and_texts(make, dense_data(24), rows=4, accumulation_steps=3)
    (said,) = told
    assert "BatchNormalization layers in training mode" in said


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
    TwoLosses,
    Masked,
    Penalized,
    ComputesLoss,
    SumOfOwn,
    Changing,
    ByData,
]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", TRIED)
def test_what_a_step_of_ones_own_averages_over_is_found_by_trying(kind):
    found = difference_of_fits(make_of(kind), arguments, dense_data(31), **WAYS["steps"])
    assert found <= LIMIT


def test_a_sum_beside_regularizers_is_exact_or_told():
    def make():
        first = layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1))
        return Own([keras.Input((4,)), first, layers.Dense(2)])

    def of_sum():
        loss = keras.losses.MeanSquaredError(reduction="sum")
        return {"optimizer": keras.optimizers.SGD(0.01), "loss": loss}

    assert difference_of_fits(make, of_sum, dense_data(31), **WAYS["size"]) <= LIMIT
    found, told = difference_and_texts(
        make, dense_data(24), rows=4, compile_args=of_sum, accumulation_steps=3
    )
    assert found > 0.01
    assert [text.partition(".")[0] for text in told] == [UNLIKE]


def test_trying_leaves_no_trace():
    """Random numbers and metrics are those of a step that says what it averages over."""

    def train_one(base):
        model = accumulate(seeded(make_of(base)), accumulation_steps=2)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(*dense_data(16), batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    for a, b in zip(train_one(Drops), train_one(ruled(Drops)), strict=True):
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


def test_a_step_that_is_no_mean_any_more_later_is_told_of():
    x, y = dense_data(36)
    y = np.abs(y)
    y[24:] *= np.sign(np.arange(12) % 3 - 0.5)[:, None]

    class TakesRoots(OfSamples):
        def loss_of(self, z, y):
            loss = torch.square(z - y).mean()
            return torch.sqrt(loss) if (y < 0).any() else loss

    model = accumulate(make_of(TakesRoots)(), accumulation_steps=3)
    model.compile("sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.fit(x[:24], y[:24], batch_size=4, shuffle=False, verbose=0)
    with pytest.warns(UserWarning, match=UNLIKE) as told:
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert len(texts_of(told)) == 1


class ClipsAfterUpdate(Own):
    """What it clips is not that large before the first update."""

    def update(self):
        super().update()
        for v in self.trainable_weights:
            v.value.data.clamp_(-2.0, 2.0)


class Counting(Own):
    def __init__(self, *args):
        super().__init__(*args)
        self.count = self.add_weight(name="count", trainable=False)

    def update(self):
        self.count.assign_add(1.0)
        super().update()


class WritesLater(Own):
    """Begins to write to a variable after the first update."""

    def __init__(self, *args):
        super().__init__(*args)
        self.target = self.add_weight(name="target", shape=(2,), trainable=False)

    def update(self):
        super().update()
        if int(self.optimizer.iterations) > 0:
            self.target.assign(self.trainable_weights[-1])


# What differs, as a pattern.
TOLD = {
    Clipping: "gradient of .*(kernel|bias)",
    ClampsLater: "gradient of .*(kernel|bias)",
    ByGlobalName: "gradient of .*(kernel|bias)",
    ClipsWeights: "(kernel|bias)",
    ClipsByData: "(kernel|bias)",
    ClipsAfterUpdate: "(kernel|bias)",
    Counting: "count",
    WritesLater: "target",
}


def built(kind):
    """Return a function that makes a model, and an optimizer that is no attribute of it."""

    def make():
        elsewhere["optimizer"] = keras.optimizers.SGD(0.1)
        model = make_of(kind)()
        weights = model.trainable_variables
        elsewhere["optimizer"].build(weights[1:] if kind is ByGlobalName else weights)
        return model

    return make


@pytest.mark.every_case
@pytest.mark.parametrize("kind", TOLD)
def test_steps_that_do_not_add_up_are_told_of(kind):
    def compile_args():
        rate = 10.0 if kind is ClipsAfterUpdate else 0.1
        return {"optimizer": keras.optimizers.SGD(rate), "loss": "mse"}

    found, told = difference_and_texts(
        built(kind), dense_data(72), rows=4, compile_args=compile_args, accumulation_steps=3
    )
    assert found > 0.01
    (said,) = told
    assert said.startswith(UNLIKE)
    assert re.search(f"{TOLD[kind]}.* differs", said)


REFUSED = {
    Twice: "applies 'SGD' twice",
    ByOneOfOthers: "if its optimizers are attributes of the model",
    Never: "if its optimizers are attributes of the model",
    ByHand: "if its optimizers are attributes of the model",
}


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:It is not known whether:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_steps_that_cannot_be_accumulated_are_refused(kind):
    model = accumulate(built(kind)(), accumulation_steps=3)
    model.compile(keras.optimizers.SGD(0.1, name="SGD"), "mse")
    with pytest.raises(RuntimeError, match=REFUSED[kind]) as caught:
        model.fit(*dense_data(12), batch_size=6, verbose=0)
    assert "Received: " in str(caught.value)
    assert model.has_updated


@pytest.mark.every_case
@pytest.mark.parametrize(
    "kind",
    [Compares, Clipping, Twice, ByHand, ByOneOfOthers, ByGlobalName, ClipsByData, OfTorch],
)
def test_they_are_exact_where_batches_are_split(kind):
    assert difference_of_fits(built(kind), arguments, dense_data(31), **WAYS["size"]) <= LIMIT


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


@pytest.mark.parametrize("way", ["both", "steps"])
def test_a_rule_of_ones_own_weighs_microbatches(way):
    found = difference_of_fits(make_of(ruled(OwnLoss)), arguments, dense_data(31), **WAYS[way])
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


def of_two(steps, rows, settings):
    """Return a trained model with two optimizers, and the weights that it began with."""
    keras.utils.set_random_seed(1)
    model = steps()
    x, y = dense_data(31)
    model(x[:1]), model.other(x[:1])
    if settings:
        model = accumulate(model, **settings)
    model.compile()
    start = model.get_weights()
    model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return model, start


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


@pytest.mark.every_case
@pytest.mark.parametrize("steps", [Adversarial, TogetherAtLast])
@pytest.mark.parametrize("way", ["steps", "size"])
def test_several_optimizers_match_the_full_batch(steps, way):
    settings = {"accumulation_steps": WAYS[way].get("steps", 1)}
    settings["microbatch_size"] = WAYS[way].get("size")
    model, start = of_two(steps, WAYS[way]["rows"], settings)
    reference, _ = of_two(steps, 12, None)
    assert relative_difference(model.get_weights(), reference.get_weights(), start) <= 1e-4
    assert [int(o.iterations) for o in (model.one_optimizer, model.other_optimizer)] == [6, 6]


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
def test_what_follows_from_the_update_before_is_told_of(steps):
    with pytest.warns(UserWarning, match=f"{UNLIKE}.*gradient of") as told:
        model, start = of_two(steps, 4, {"accumulation_steps": 3})
    assert len(texts_of(told)) == 1
    reference, _ = of_two(steps, 12, None)
    assert relative_difference(model.get_weights(), reference.get_weights(), start) > 1e-3


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
    logs = []
    for rows, settings in ((12, None), (4, {"accumulation_steps": 3})):
        model = seeded(make_of(OfSum))
        model = accumulate(model, **settings) if settings else model
        model.compile(keras.optimizers.SGD(0.001))
        history = model.fit(*dense_data(24), batch_size=rows, shuffle=False, verbose=0).history
        logs.append([history[name][0] for name in ("tensor", "detached", "number")])
    np.testing.assert_allclose(logs[1], logs[0], rtol=1e-5)


class OfKeras(AccumulatingModel, keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = dense_model()

    def call(self, x):
        return self.layer(x)


class Derived(OfKeras):
    """Inherits the mixin from a class of the user's own."""


@pytest.mark.every_case
@pytest.mark.parametrize("made", [OfKeras, Derived])
def test_a_class_may_inherit_the_mixin(made):
    def of(microbatch_size):
        model = seeded(made)
        model.compile(keras.optimizers.SGD(0.1), "mse", microbatch_size=microbatch_size)
        start = model.get_weights()
        model.fit(*dense_data(12), batch_size=6, shuffle=False, verbose=0)
        return model.get_weights(), start

    (weights, start), (reference, _) = of(4), of(None)
    assert relative_difference(weights, reference, start) <= LIMIT
