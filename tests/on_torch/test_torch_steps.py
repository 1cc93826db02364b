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
from training import difference_of_fits, train

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


def ruled(kind):
    class Ruled(AccumulatingModel, kind):
        def microbatch_weight(self, x, y=None, sample_weight=None):
            return len(x)

    return Ruled
