"""On PyTorch, a step that leaves its gradients to the next batch is told of, once; no other is."""

import keras
import pytest
from helpers import (
    LIMIT,
    dense_model,
)
from torch_step import Step, torch
from training import difference_and_said, train_and_hear

SAYS = "does not train as the full batch"


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
