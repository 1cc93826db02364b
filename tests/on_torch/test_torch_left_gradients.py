"""On PyTorch, a step that leaves its gradients to the next batch is told of, once; no other is."""

import keras
import pytest
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
    relative_difference,
    seeded,
)
from torch_step import Step, torch
from training import difference_and_said, train_and_hear

from ga_model import accumulate

SAYS = "which adds the gradients of each batch to those of the batch before"


class Clears(Step):
    """Clears gradients in a method of subclasses, before them or after the update."""

    def before(self):
        pass

    def after(self):
        pass

    def train_step(self, data):
        x, y, *_ = data
        self.before()
        loss = self.forward_loss(x, y)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in self.trainable_weights])
        self.after()
        return {"loss": loss.detach()}


class Never(Clears):
    pass


class AtStart(Clears):
    def before(self):
        self.zero_grad()


class InPlace(Clears):
    def before(self):
        self.zero_grad(set_to_none=False)


class ByLayer(Clears):
    def before(self):
        for layer in self.layers:
            layer.zero_grad()


class ByHand(Clears):
    def before(self):
        for weight in self.parameters():
            weight.grad = None


class AtEnd(Clears):
    def after(self):
        for weight in self.parameters():
            weight.grad = None


class InPlaceAtEnd(Clears):
    def after(self):
        for weight in self.parameters():
            weight.grad.zero_()


class ByFunction(Step):
    def train_step(self, data):
        x, y, *_ = data
        loss = self.forward_loss(x, y)
        gradients = torch.autograd.grad(loss, [w.value for w in self.trainable_weights])
        with torch.no_grad():
            self.optimizer.apply(list(gradients))
        return {"loss": loss.detach()}


class InParts(Step):
    """Takes a gradient for something else first, and clears it."""

    def train_step(self, data):
        x, y = data
        self.forward_loss(2.0 * x, y).backward(retain_graph=True)
        return super().train_step(data)  # which begins with `zero_grad`


def make_of(kind):
    return lambda: kind([keras.Input((4,)), *dense_model().layers])


CLEAR = [AtStart, InPlace, ByLayer, ByHand, AtEnd, InPlaceAtEnd, ByFunction]
STEPS = {"accumulation_steps": 3}
BOTH = {"accumulation_steps": 3, "microbatch_size": 3}


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [STEPS, BOTH])
def test_a_step_that_never_clears_gradients_is_told_of_once(settings):
    difference, said = difference_and_said(make_of(Never), settings, rows=4)
    assert difference > 1e-2
    assert [SAYS in text for text in said] == [True]
    assert "call `self.zero_grad()`" in said[0]
    *_, said = train_and_hear(make_of(Never), {**STEPS, "skip_nonfinite": True}, rows=4)
    assert [SAYS in text for text in said] == [True]


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [STEPS, BOTH])
@pytest.mark.parametrize("kind", CLEAR)
def test_a_step_that_clears_gradients_is_not(kind, settings):
    difference, said = difference_and_said(make_of(kind), settings, rows=4)
    assert difference <= LIMIT
    assert not said


def test_gradients_that_are_cleared_before_others_are_taken_are_not():
    said = train_and_hear(make_of(InParts), STEPS, rows=4)[2]
    assert not [text for text in said if SAYS in text]


def test_a_step_is_told_of_as_soon_as_there_is_a_second_update():
    model = accumulate(seeded(make_of(Never)), accumulation_steps=3)
    model.compile("sgd")
    x, y = map(torch.tensor, dense_data(16))
    for begin in range(0, 12, 4):
        model.train_on_batch(x[begin : begin + 4], y[begin : begin + 4])
    assert all(weight.value.grad.any() for weight in model.trainable_weights)
    with pytest.warns(UserWarning, match=SAYS):
        model.train_on_batch(x[12:], y[12:])
    assert all(weight.value.grad is None for weight in model.trainable_weights)


def clear_by_call(model):
    model.zero_grad()


def clear_by_hand(model):
    for weight in model.parameters():
        weight.grad = None


def clear_in_place(model):
    for weight in model.parameters():
        if weight.grad is not None:
            weight.grad.zero_()


@pytest.mark.every_case
@pytest.mark.parametrize("clear", [clear_by_call, clear_by_hand, clear_in_place])
def test_gradients_that_are_cleared_between_batches_are_not_told_of(clear):
    starts, weights = [], []
    for settings in ({}, STEPS):
        model = accumulate(seeded(make_of(Never)), **settings)
        model.compile(keras.optimizers.SGD(0.1))
        starts.append(model.get_weights())
        clearing = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, model=model: clear(model)
        )
        rows = 4 if settings else 12
        x, y = dense_data(24)
        model.fit(x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=[clearing])
        weights.append(model.get_weights())
    assert relative_difference(weights[1], weights[0], starts[0]) <= LIMIT


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def add_others(model):
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.every_case
@pytest.mark.parametrize("change", [clip, add_others])
def test_gradients_that_are_changed_between_batches_are_told_of(change):
    model = accumulate(seeded(make_of(Never)), **STEPS)
    model.compile("sgd")
    x, y = dense_data(24)
    changing = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: change(model))
    with pytest.warns(UserWarning, match=SAYS):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[changing])


def test_no_gradients_are_there_after_training():
    model = accumulate(seeded(make_of(Never)), **STEPS)
    model.compile("sgd")
    x, y = dense_data(12)
    model.fit(x, y, batch_size=4, verbose=0)
    assert all(weight.value.grad is None for weight in model.trainable_weights)
