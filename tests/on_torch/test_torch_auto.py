"""`microbatch_size="auto"` on PyTorch: the largest size that fits, and smaller ones where it fails.

What fits is decided by a layer, by the number of rows, which fails as PyTorch's allocations do.
"""

import keras
import numpy as np
import pytest
import torch
from helpers import assert_changed, assert_close, dense_data, seeded, sequential, state_of
from keras import layers, ops
from keras.optimizers import SGD
from limited_memory import Memory, limited
from own_train_steps import WassersteinGAN

from ga_model import accumulate

pytestmark = pytest.mark.filterwarnings("ignore:BatchNormalization layers in training mode")


def smooth_model(memory, *parts):
    hidden = layers.Dense(6, activation="tanh")
    return sequential((4,), hidden, *parts, limited(memory), layers.Dense(2))


def model_with_state(memory):
    return smooth_model(memory, layers.BatchNormalization(), layers.Dropout(0.3))


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


def compiled(make, memory, size="auto", **settings):
    model = accumulate(seeded(lambda: make(memory)), microbatch_size=size, **settings)
    model.compile("adam", **({} if isinstance(make, type) else {"loss": "mse", "metrics": ["mae"]}))
    return model


def assert_same(values, expected, rtol=0):
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=rtol, atol=rtol)


def fit(model, data, rows=12, **kwargs):
    torch.manual_seed(5)  # where dropout without a seed draws
    kwargs = {"verbose": 0, **kwargs}
    return model.fit(*data, batch_size=rows, shuffle=False, **kwargs).history


SETTINGS = [
    {},
    {"accumulation_steps": 3},
    {"skip_nonfinite": True},
    {"loss_over": "batch"},
    {"accumulation_steps": 2, "loss_over": "batch"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_repeated_batch_is_that_of_the_smaller_size(settings):
    """The limit drops in the middle of a batch, in windows of several of the last."""
    data = dense_data(84)

    expected = compiled(model_with_state, Memory(), 5, **settings)
    model = compiled(model_with_state, memory := Memory(5), **settings)

    class Sizes(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4 and self.model is model:
                memory.drop_in(1, 3)
            elif batch == 4:
                expected.microbatch_size = 3

    expected_logs = fit(expected, data, callbacks=[Sizes()])
    with pytest.warns(UserWarning, match="no longer fits in memory.*retried with 3"):
        logs = fit(model, data, callbacks=[Sizes()])
    assert model.microbatch_size == 3
    assert_same(state_of(model), state_of(expected), rtol=1e-5)
    assert_same(list(logs.values()), list(expected_logs.values()), rtol=1e-5)


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
    assert_same(state_of(models[0]), state_of(models[1]))
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
        assert_same(model.get_weights(), before)
        model.microbatch_size = 4
        model.train_on_batch(*dense_data(16))
        assert_changed(model.get_weights(), before)


def test_another_error_is_no_want_of_memory():
    model = compiled(smooth_model, memory := Memory())
    memory.take = lambda rows: (_ for _ in ()).throw(RuntimeError("of the user"))
    with pytest.raises(RuntimeError, match="of the user"):
        model.train_on_batch(*dense_data(12))
