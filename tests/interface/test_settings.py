"""What is not passed stays as it is, and None switches a setting off."""

import inspect

import keras
import numpy as np
import pytest
from helpers import dense_data, dense_model

from ga_model import AccumulatingModel, accumulate, check_equivalence

GIVEN = {
    "accumulation_steps": 3,
    "microbatch_size": 2,
    "skip_nonfinite": True,
    "loss_over": "batch",
    "verify": False,
}
DEFAULT = {
    "accumulation_steps": 1,
    "microbatch_size": None,
    "skip_nonfinite": False,
    "loss_over": "auto",
    "verify": True,
}


def settings_of(model):
    return {name: getattr(model, name) for name in GIVEN}


def set_model(**settings):
    model = accumulate(dense_model(), **{**GIVEN, **settings})
    model.compile("sgd", "mse")
    return model


WAYS = {
    "compile": lambda model, **settings: model.compile("sgd", "mse", **settings),
    "accumulate": accumulate,
    "attribute": lambda model, **settings: [setattr(model, *pair) for pair in settings.items()],
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, "auto"])
@pytest.mark.parametrize("changed", [{}, *({name: None} for name in GIVEN)], ids=str)
def test_none_switches_a_setting_off_and_the_others_stay(changed, size, way):
    model = set_model(microbatch_size=size)
    WAYS[way](model, **changed)
    expected = {**GIVEN, "microbatch_size": size, **{name: DEFAULT[name] for name in changed}}
    assert settings_of(model) == expected
    WAYS[way](model, accumulation_steps=np.int64(2))
    assert (model.accumulation_steps, type(model.accumulation_steps)) == (2, int)


def test_all_switched_off_is_plain_keras():
    model = set_model(microbatch_size="auto")
    accumulate(model, **dict.fromkeys(GIVEN))
    model.train_on_batch(*dense_data(6))
    assert settings_of(model) == DEFAULT
    assert model.optimizer.iterations == 1


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("accumulation_steps", (1, 2, "batch")),
        ("microbatch_size", (3, None, "batch")),
        ("loss_over", (3, 2, "auto")),
    ],
)
def test_a_check_takes_none_as_off_and_the_models_settings_else(name, reported):
    model, (x, y) = set_model(), dense_data(12)
    model.skip_nonfinite = False
    report = check_equivalence(model, x, y, batch_size=4, updates=1, **{name: None})
    assert (report.accumulation_steps, report.microbatch_size, report.loss_over) == reported
    assert settings_of(model) == {**GIVEN, "skip_nonfinite": False}


@pytest.mark.every_case
@pytest.mark.parametrize("function", [AccumulatingModel.compile, accumulate, check_equivalence])
def test_a_signature_says_that_settings_are_unchanged(function):
    parameters = inspect.signature(function).parameters
    assert "object at 0x" not in str(inspect.signature(function))
    assert {repr(parameters[name].default) for name in GIVEN if name in parameters} == {"unchanged"}


class SetsItself(keras.Model):
    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.accumulation_steps = 4


@pytest.mark.parametrize("given", [{}, {"accumulation_steps": 2}])
def test_a_setting_of_the_users_own_compile_stays_unless_another_is_passed(given):
    model = accumulate(SetsItself())
    model.compile("sgd", "mse", **given)
    assert model.accumulation_steps == given.get("accumulation_steps", 4)


class Subclass(AccumulatingModel, keras.Model):
    pass


@pytest.mark.every_case
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_completion_finds_what_a_model_can_do(is_wrapped):
    model = accumulate(keras.Sequential()) if is_wrapped else Subclass()
    names = {*GIVEN, "close_window", "has_updated", "on_update", "num_skipped_microbatches"}
    assert names | {"fit", "layers"} <= set(dir(model))
