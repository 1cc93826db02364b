"""On PyTorch, a step may apply optimizers of `torch.optim`, also in windows of several batches."""

import keras
import pytest
from case import TRIED, Refused
from helpers import LIMIT, dense_data, relative_difference, seeded
from torch_step import Step, case_of, check, every, model_of, torch
from training import train

from ga_model import AccumulationScheduler, accumulate

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.05),
}


class Own(Step):
    """A step as in scripts of PyTorch."""

    make_optimizer = staticmethod(OPTIMIZERS["AdamW"])

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.of_torch = self.make_optimizer(self.parameters())

    def clear(self):
        self.of_torch.zero_grad()

    def update(self):
        self.of_torch.step()


class Two(Own):
    """An optimizer for the kernels, and one of Keras's for the rest."""

    def compile(self):
        keras.Model.compile(self, keras.optimizers.Adam(0.01))
        kernels = [v.value for v in self.trainable_variables if v.name == "kernel"]
        self.of_torch = torch.optim.SGD(kernels, 0.1, nesterov=True, momentum=0.5)

    def clear(self):
        self.zero_grad()

    def update(self):
        super().update()
        biases = [v for v in self.trainable_variables if v.name == "bias"]
        self.optimizer.apply([v.value.grad for v in biases], biases)


class Closure(Own):
    def update(self):
        self.of_torch.step(lambda: 0.0)


class OfOthers(Own):
    def compile(self):
        super().compile()
        other = torch.nn.Parameter(torch.zeros(3))
        self.of_torch = torch.optim.SGD([*self.parameters(), other], 0.1)


def own(base, *settings, refused=None, **kwargs):
    expects = {"across": Refused(rf"{refused}(.|\n)*`microbatch_size`")} if refused else {}
    settings = "windows", "split", *settings
    return case_of(model_of(base), expects, settings=settings, compile=dict, **kwargs)


CASES = {
    **{
        name: own(
            type(name, (Own,), {"make_optimizer": staticmethod(make)}),
            "both",
            "added up",
        )
        for name, make in OPTIMIZERS.items()
    },
    "beside one of Keras": own(Two),
    "with a closure": own(Closure, refused="passes a closure to `step`"),
    "of other parameters": own(OfOthers, refused="other parameters"),
}


@every(CASES)
def test_training_is_that_of_the_full_batch(case, setting):
    check(case, setting)


def fit(base=Own, rows=12, **settings):
    """Return the model, and the weights that it began with."""
    return train(model_of(base), dict, dense_data(31), rows=rows, epochs=3, **settings)


WINDOWS = {"rows": 4, "accumulation_steps": 3}
SPLIT = {"microbatch_size": 5}


def test_its_state_and_the_last_gradients_are_those_of_plain_training():
    (model, _), (expected, _) = fit(**WINDOWS), fit()
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
    with pytest.warns(UserWarning, match=f"{TRIED}.*lr"):
        model, _ = fit(Schedules, **WINDOWS)
    assert model.schedule.last_epoch == 24
    for settings in ({"rows": 12}, SPLIT):  # as in plain training
        assert fit(Schedules, **settings)[0].schedule.last_epoch == 9


def test_a_schedule_goes_on_with_each_update_by_on_update():
    class OnUpdate(Schedules):
        def update(self):
            Own.update(self)

        def on_update(self):
            self.schedule.step()

    expected, start = fit(Schedules)
    model, _ = fit(OnUpdate, **WINDOWS)
    assert model.schedule.last_epoch == expected.schedule.last_epoch == 9
    found = relative_difference(model.get_weights(), expected.get_weights(), start)
    assert found <= LIMIT


def test_a_size_is_found_for_it():
    assert fit(microbatch_size="auto")[0].microbatch_size == 12


def test_its_updates_are_counted():
    """By callbacks, which would see none, and not in trials."""
    told = []
    own = keras.callbacks.Callback()
    own.on_update_end = lambda number, logs=None: told.append(number)
    scheduler = AccumulationScheduler(lambda number: 2 if number < 2 else 4, by="update")
    model = seeded(model_of(Own))
    accumulate(model, accumulation_steps=2).compile()
    model.fit(*dense_data(48), batch_size=4, verbose=0, callbacks=[scheduler, own])
    assert told == [1, 2, 3, 4]
