"""On PyTorch, a `train_step` of one's own is heard as it takes gradients and applies them."""

import dataclasses
import functools
import random
from collections import deque

import keras
import numpy as np
import pytest
import torch_step
from case import TRIED, Refused, Warns, sgd
from helpers import dense_data, relative_difference, seeded
from keras import layers, ops
from torch_step import DIFFERS, Step, check, every, model_of, torch
from training import difference_and_said, train_and_hear

from ga_model import AccumulatingModel, accumulate

# How gradients are taken and applied.


class ByFunction(Step):
    create_graph = False

    def clear(self):
        pass

    def take(self, loss):
        weights = [v.value for v in self.trainable_weights]
        self.gradients = torch.autograd.grad(loss, weights, create_graph=self.create_graph)

    def update(self):
        self.optimizer.apply([g.detach() for g in self.gradients], self.trainable_weights)


class Differentiable(ByFunction):
    """Its gradients could be differentiated once more."""

    create_graph = True


class InPairs(Step):
    def update(self):
        self.optimizer.apply_gradients([(v.value.grad, v) for v in self.trainable_weights])


class TwoLosses(Step):
    def take(self, loss):
        self.forward_loss(*map(torch.as_tensor, dense_data(4))).backward()
        loss.backward()


class InParts(Step):
    """Takes a gradient for something else first, and clears it."""

    def take(self, loss):
        (2.0 * loss).backward(retain_graph=True)
        self.zero_grad()
        loss.backward()


class Unused(Step):
    """Of whose weights some get no gradient."""

    def __init__(self, parts):
        super().__init__(parts)
        self.unused = layers.Dense(3)
        self.unused.build((None, 4))

    def update(self):
        used = [w for w in self.trainable_weights if w.value.grad is not None]
        assert len(used) == 4
        self.optimizer.apply([w.value.grad for w in used], used)


class Checkpointed(Step):
    """Computes the activations again when it takes the gradient."""

    is_reentrant = False

    def forward_loss(self, x, y):
        outputs = torch.utils.checkpoint.checkpoint(
            functools.partial(self, training=True),
            x.clone().requires_grad_(),
            use_reentrant=self.is_reentrant,
        )
        return torch.square(outputs - y).mean()


class Reentrant(Checkpointed):
    is_reentrant = True


# What is done with gradients, and with weights.


class Clipping(Step):
    def update(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        super().update()


class ByData(Step):
    """Writes to gradients past PyTorch's count."""

    def update(self):
        for v in self.trainable_weights:
            v.value.grad.data.add_(0.1 * v.value.data)
        super().update()


class ClampsLater(Step):
    """The same, where it first changes something after some batches."""

    num_batches = 0

    def update(self):
        self.num_batches = self.num_batches + 1
        if self.num_batches > 4:
            for v in self.trainable_weights:
                v.value.grad.data.clamp_(-0.001, 0.001)
        super().update()


class ClipsByData(Step):
    limit = 0.1

    def update(self):
        super().update()
        for v in self.trainable_weights:
            v.value.data.clamp_(-self.limit, self.limit)


class ClipsLater(ClipsByData):
    """What it clips is not that large before the first update."""

    limit = 2.0


class WritesLater(Step):
    """Begins to write to a variable after the first update."""

    def __init__(self, *args):
        super().__init__(*args)
        self.target = self.add_weight(name="target", shape=(2,), trainable=False)

    def update(self):
        super().update()
        if int(self.optimizer.iterations) > 0:
            self.target.assign(self.trainable_weights[-1])


class RootLater(Step):
    """Is no mean any more where a target is negative."""

    def forward_loss(self, x, y):
        loss = super().forward_loss(x, y)
        return torch.sqrt(loss) if (y < 0).any() else loss


def positive_at_first(rows):
    x, y = dense_data(rows)
    y[:24] = np.abs(y[:24])
    return x, y


class ByOther(Step):
    """Applies an optimizer that is no attribute of the model."""

    number_of_own = 0  # of weights for which it is one

    def __init__(self, parts):
        super().__init__(parts)
        elsewhere["optimizer"] = keras.optimizers.SGD(0.1)
        elsewhere["optimizer"].build(self.trainable_variables[self.number_of_own :])

    def update(self):
        weights = self.trainable_weights
        own, others = weights[: self.number_of_own], weights[self.number_of_own :]
        if own:
            self.optimizer.apply([v.value.grad for v in own], own)
        elsewhere["optimizer"].apply([v.value.grad for v in others], others)


class ByOwnAndOther(ByOther):
    number_of_own = 1


elsewhere = {"optimizer": None}


class OfTorch(Step):
    def update(self):
        self.own = torch.optim.SGD(self.parameters(), 0.1)
        self.own.step()


def differs(what, base, **kwargs):
    expects = {"across": Warns(f"(?s){TRIED}.*{what}.* differs")}
    return case_of(base, expects, samples=72, **kwargs)


def case_of(base, expects=None, settings=("windows", "both", "split"), **kwargs):
    kwargs = {"compile": sgd(None), **kwargs}
    return torch_step.case_of(model_of(base), expects, settings=settings, **kwargs)


OF_GRADIENT, OF_WEIGHT = "gradient of .*(kernel|bias)", "(kernel|bias)"
STEPS = {
    base.__name__: case_of(base)
    for base in (
        *(ByFunction, Differentiable, InPairs, TwoLosses, InParts, Unused),
        *(Checkpointed, Reentrant, ByData),
    )
}
CHANGES = {
    "clips gradients": differs(OF_GRADIENT, Clipping),
    "clamps gradients later": differs(OF_GRADIENT, ClampsLater),
    "optimizers of two names": differs(OF_GRADIENT, ByOwnAndOther),
    "clips weights by data": differs(OF_WEIGHT, ClipsByData),
    "clips weights later": differs(OF_WEIGHT, ClipsLater, compile=sgd(None, 10.0)),
    "writes later": differs("target", WritesLater),
    "a root later": dataclasses.replace(case_of(RootLater, DIFFERS), data=positive_at_first),
    "an optimizer elsewhere": case_of(
        ByOther,
        {"across": Refused("if its optimizers are attributes of the model", is_late=True)},
    ),
    "an optimizer of PyTorch": case_of(OfTorch, settings=("split",)),
}


@every(STEPS)
def test_steps_are_exact(case, setting):
    check(case, setting)


@every(CHANGES)
def test_steps_that_do_not_add_up_are_exact_or_told(case, setting):
    check(case, setting)


# A step that leaves its gradients to the next batch is told of, once; no other is.


class Never(Step):
    def clear(self):
        pass


class InPlace(Step):
    def clear(self):
        self.zero_grad(set_to_none=False)


class ByLayer(Step):
    def clear(self):
        for layer in self.layers:
            layer.zero_grad()


class ByHand(Step):
    def clear(self):
        for weight in self.parameters():
            weight.grad = None


class AtEnd(Never):
    def update(self):
        super().update()
        ByHand.clear(self)


class InPlaceAtEnd(Never):
    def update(self):
        super().update()
        for weight in self.parameters():
            weight.grad.zero_()


CLEARS = {
    "never": case_of(Never, DIFFERS, ("windows", "both", "windows that may be left out")),
    **{
        base.__name__: case_of(base, settings=("windows", "both"))
        for base in (InPlace, ByLayer, ByHand, AtEnd, InPlaceAtEnd)
    },
}


@every(CLEARS)
def test_a_step_that_never_clears_gradients_is_told_of(case, setting):
    check(case, setting)


# Trying.


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

    def __init__(self, parts):
        super().__init__(parts)
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
    def train_one(base):
        model = accumulate(seeded(model_of(base)), accumulation_steps=2)
        model.compile(keras.optimizers.SGD(0.1))
        model.fit(*dense_data(16), batch_size=4, shuffle=False, verbose=0)
        return model

    tried, told = train_one(KeepsAll), train_one(Ruled)
    assert (tried.seen, len(tried.kept.values)) == ({0, 1, 2, 3}, 4)
    assert (tried.by_name["all"], list(tried.last)) == ([1, 2, 3, 4], [2, 3, 4])
    assert tried.drawn == told.drawn


# Autocast.


class UnderAutocast(Step):
    def forward_loss(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = self(x, training=True)
        return torch.square(outputs.float() - y).mean()


class AllUnderAutocast(Step):
    def train_step(self, data):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().train_step(data)


NOTED = set()


class Notes(layers.Dense):
    def call(self, x):
        if x.device.type != "meta":  # to be built
            NOTED.add((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return super().call(x)


@pytest.mark.parametrize("base", [UnderAutocast, AllUnderAutocast])
def test_autocast_is_that_of_the_call(base):
    def make(first):
        return lambda: base([keras.Input((4,)), first(5, activation="tanh"), layers.Dense(2)])

    NOTED.clear()
    start, weights, said = train_and_hear(make(Notes), {"microbatch_size": 5})
    _, expected, _ = train_and_hear(make(layers.Dense), {})
    # Gradients of microbatches are rounded to bfloat16, each of them.
    assert relative_difference(weights, expected, start) <= 2**-8
    assert (said, NOTED) == ([], {(True, torch.bfloat16)})
    difference, said = difference_and_said(make(layers.Dense), {"accumulation_steps": 3}, rows=4)
    assert difference <= 2e-2  # what bfloat16 rounds
    assert said == []
