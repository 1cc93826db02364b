"""`microbatch_size="auto"` on PyTorch: steps of several optimizers, and errors of other kinds."""

import keras
import pytest
import torch
from helpers import (
    assert_changed,
    assert_close,
    assert_equal,
    dense_data,
    seeded,
    sequential,
    state_of,
)
from keras import layers, ops
from keras.optimizers import SGD
from limited_memory import Memory, limited
from own_train_steps import WassersteinGAN

from ga_model import accumulate


def smooth_model(memory):
    hidden = layers.Dense(6, activation="tanh")
    return sequential((4,), hidden, limited(memory), layers.Dense(2))


class Adversaries(WassersteinGAN):
    """Applies one optimizer three times before it takes the other network's gradient."""

    def __init__(self, memory):
        self.memories, self.num_steps = (Memory(), memory), 0
        super().__init__()

    def make(self):
        self.discriminator, self.generator = map(smooth_model, self.memories)

    def compile(self, optimizer):
        super().compile([keras.optimizers.get(optimizer), SGD(0.1)])

    def step(self, x, y):
        self.num_steps += 1
        rate = self.d_optimizer.learning_rate
        rate.assign(0.9 * rate)
        return super().step(x, y)

    def loss_of_discriminator(self, x, y):
        made = ops.stop_gradient(self.generator(x))
        return ops.sqrt(ops.mean((self.discriminator(x) - made) ** 2))

    def loss_of_generator(self, x, y):
        judged = self.discriminator(x) * self.generator(x)
        return ops.sqrt(ops.mean(ops.square(ops.subtract(judged, y))))


def compiled(make, memory, size="auto"):
    model = accumulate(seeded(lambda: make(memory)), microbatch_size=size)
    model.compile("adam", **({} if isinstance(make, type) else {"loss": "mse"}))
    return model


def test_a_step_that_applies_optimizers_in_turn_gets_a_size():
    """And no second chance where it has updated."""
    data = dense_data(32)
    models = []
    for size in ("auto", 4):
        model = compiled(Adversaries, Memory(4), size)
        models.append(model)
        for part in (slice(0, 16), slice(16, 32)):
            model.train_on_batch(*[values[part] for values in data])
    assert models[0].microbatch_size == 4
    assert models[0].num_steps == 2  # trials are not counted
    assert_equal(state_of(models[0]), state_of(models[1]))
    weights = models[0].get_weights()
    models[0].memories[0].drop_in(0, 2)  # before any update
    with pytest.warns(UserWarning, match="retried with 2"):
        models[0].train_on_batch(*data)
    models[1].microbatch_size = 2
    models[1].train_on_batch(*data)
    start = seeded(lambda: Adversaries(Memory())).get_weights()
    assert_changed(models[0].get_weights(), weights)
    assert_close(models[0], models[1], start)
    models[0].memories[1].drop_in(1, 1)  # the discriminator was updated
    with pytest.raises(RuntimeError, match="retried only if its update has not begun"):
        models[0].train_on_batch(*data)


def test_an_optimizer_that_is_not_known_is_refused_before_it_updates():
    elsewhere = {}

    class OfPyTorch(Adversaries):
        def update(self, gradients, variables, optimizer):
            if not hasattr(self, "optimizer_of_torch"):
                self.optimizer_of_torch = torch.optim.SGD([v.value for v in variables], 0.1)
            self.optimizer_of_torch.step()

    class ByAnotherName(Adversaries):
        def update(self, gradients, variables, optimizer):
            other = elsewhere.setdefault(variables[0].path, SGD(0.1))
            super().update(gradients, variables, other)

    for make in (ByAnotherName, OfPyTorch):
        model = compiled(make, Memory(4))
        before = model.get_weights()
        with pytest.raises(ValueError, match="tries steps without updates"):
            model.train_on_batch(*dense_data(16))
        assert_equal(model.get_weights(), before)
        model.microbatch_size = 4
        model.train_on_batch(*dense_data(16))
        assert_changed(model.get_weights(), before)


def test_another_error_is_no_want_of_memory():
    model = compiled(smooth_model, memory := Memory())
    memory.take = lambda rows: (_ for _ in ()).throw(RuntimeError("of the user"))
    with pytest.raises(RuntimeError, match="of the user"):
        model.train_on_batch(*dense_data(12))
