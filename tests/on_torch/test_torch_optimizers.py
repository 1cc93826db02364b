"""On PyTorch, a step may apply optimizers of `torch.optim`, also in windows of several batches."""

import keras
import numpy as np
import pytest
from helpers import LIMIT, dense_data, dense_model, relative_difference, seeded
from torch_step import torch

from ga_model import accumulate

UNLIKE = "A window of microbatches does not train as the full batch"
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.05),
}


class Own(keras.Sequential):
    """A step as in scripts of PyTorch."""

    make_optimizer = staticmethod(OPTIMIZERS["AdamW"])

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.of_torch = self.make_optimizer(self.parameters())

    def train_step(self, data):
        x, y = data
        self.of_torch.zero_grad()
        loss = torch.nn.functional.mse_loss(self(x, training=True), y)
        loss.backward()
        self.update()
        return {"loss": loss.detach()}

    def update(self):
        self.of_torch.step()


def fit(kind=Own, rows=12, epochs=3, fit_args=None, **settings):
    """Return the model, the weights that it began with, and its logs."""
    model = seeded(lambda: kind([keras.Input((4,)), *dense_model().layers]))
    if settings:
        model = accumulate(model, **settings)
    model.compile()
    start = model.get_weights()
    arguments = {"epochs": epochs, "shuffle": False, "verbose": 0, **(fit_args or {})}
    return model, start, model.fit(*dense_data(31), batch_size=rows, **arguments).history


def difference(kind=Own, rows=12, **settings):
    expected, start, logs = fit(kind)
    model, _, own = fit(kind, rows, **settings)
    np.testing.assert_allclose(own["loss"], logs["loss"], rtol=1e-5)
    return relative_difference(model.get_weights(), expected.get_weights(), start)


WINDOWS = {"rows": 4, "accumulation_steps": 3}
BOTH = {"rows": 4, "accumulation_steps": 3, "microbatch_size": 3}
SPLIT = {"microbatch_size": 5}
ADDED_UP = {"microbatch_size": 5, "loss_over": "microbatch"}


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [WINDOWS, BOTH, SPLIT, ADDED_UP])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_the_full_batch(name, settings):
    class Named(Own):
        make_optimizer = staticmethod(OPTIMIZERS[name])

    assert difference(Named, **settings) <= LIMIT


class Two(Own):
    """An optimizer for the kernels, and one of Keras's for the rest."""

    def compile(self):
        keras.Model.compile(self, keras.optimizers.Adam(0.01))
        kernels = [v.value for v in self.trainable_variables if v.name == "kernel"]
        self.of_torch = torch.optim.SGD(kernels, 0.1, nesterov=True, momentum=0.5)

    def update(self):
        super().update()
        biases = [v for v in self.trainable_variables if v.name == "bias"]
        self.optimizer.apply([v.value.grad for v in biases], biases)


@pytest.mark.every_case
@pytest.mark.parametrize("settings", [WINDOWS, SPLIT])
def test_one_of_keras_may_be_beside_it(settings):
    class Clears(Two):
        def train_step(self, data):
            self.zero_grad()
            return super().train_step(data)

    assert difference(Clears, **settings) <= LIMIT


def test_its_state_and_the_last_gradients_are_those_of_plain_training():
    (model, *_), (expected, *_) = fit(**WINDOWS), fit()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        states = [m.of_torch.state[p] for m, p in ((model, mine), (expected, other))]
        assert states[0].keys() == states[1].keys()
        for name, value in states[1].items():
            torch.testing.assert_close(states[0][name], value, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert "step" not in vars(model.of_torch)


class Schedules(Own):
    """Lowers the rate in each step."""

    def compile(self):
        super().compile()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.of_torch, 0.5)

    def update(self):
        super().update()
        self.schedule.step()


def test_a_schedule_that_goes_on_with_each_batch_is_told_of():
    with pytest.warns(UserWarning, match=f"{UNLIKE}.*lr"):
        model, *_ = fit(Schedules, **WINDOWS)
    assert model.schedule.last_epoch == 24


@pytest.mark.parametrize("settings", [{"rows": 12}, SPLIT])
def test_it_goes_on_as_in_plain_training_where_a_batch_is_split(settings):
    model, *_ = fit(Schedules, **settings)
    assert model.schedule.last_epoch == 9


def test_a_schedule_goes_on_with_each_update_by_on_update():
    class Plain(Schedules):
        pass

    class OnUpdate(Schedules):
        def update(self):
            Own.update(self)

        def on_update(self):
            self.schedule.step()

    expected, start, _ = fit(Plain)
    model, *_ = fit(OnUpdate, **WINDOWS)
    assert model.schedule.last_epoch == expected.schedule.last_epoch == 9
    found = relative_difference(model.get_weights(), expected.get_weights(), start)
    assert found <= LIMIT


class Closure(Own):
    def update(self):
        self.of_torch.step(lambda: 0.0)


class OfOthers(Own):
    def compile(self):
        super().compile()
        other = torch.nn.Parameter(torch.zeros(3))
        self.of_torch = torch.optim.SGD([*self.parameters(), other], 0.1)


@pytest.mark.parametrize(
    ("kind", "text"), [(Closure, "passes a closure to `step`"), (OfOthers, "other parameters")]
)
def test_what_cannot_be_accumulated_is_refused_before_anything_is_trained(kind, text):
    model = accumulate(
        seeded(lambda: kind([keras.Input((4,)), *dense_model().layers])), accumulation_steps=3
    )
    model.compile()
    before = model.get_weights()
    with pytest.raises(RuntimeError, match=rf"{text}(.|\n)*`microbatch_size`"):
        model.fit(*dense_data(12), batch_size=4, verbose=0)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    difference(kind, **SPLIT)


def test_a_size_is_found_for_it():
    model, *_ = fit(microbatch_size="auto", rows=12)
    assert model.microbatch_size == 12
