"""On PyTorch, what a loss of one's own is divided by is read, once trying has shown where."""

import warnings

import keras
import numpy as np
import pytest
from ga_model.torch_engine._divisors import Divided, Tried, Watch, divisors_of
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
)
from keras import layers
from torch_step import Step, torch
from training import difference_of_fits, train

functional = torch.nn.functional
WAYS = {
    "steps": {"rows": 4, "steps": 3},
    "both": {"rows": 6, "steps": 2, "size": 4},
    "size": {"rows": 12, "size": 4},
}


def mask_of(y):
    return (y[:, 0] > -0.3).float()


def quotient(y, z):
    mask = mask_of(y)
    return (mask * torch.square(z - y).mean(1)).sum() / mask.sum()


def bounded(y, z):
    mask = mask_of(y)
    return (mask * torch.square(z - y).mean(1)).sum() / mask.sum().clamp(min=1e-7)


def selected(y, z):
    return torch.square(z - y)[mask_of(y) > 0].mean()


def of_classes(y, z):
    labels = torch.where(mask_of(y) > 0, (y[:, 0] > 0.4).long(), -100)
    return functional.cross_entropy(z, labels)  # which ignores -100


def with_penalty(y, z):
    return 2.0 * quotient(y, z) + 0.1 * torch.square(z).mean() * 0.0


LOSSES = {f.__name__: f for f in (quotient, bounded, selected, of_classes, with_penalty)}


def later(rows=60, plain=40):
    """Return data in which no sample is masked before row `plain`, and one microbatch wholly is."""
    x, y = dense_data(rows)
    y[:plain, 0] = np.abs(y[:plain, 0])
    y[plain + 4 : plain + 8, 0] = -1.0
    return x, y


def step_of(loss):
    class Own(Step):
        def forward_loss(self, x, y):
            return loss(y, self(x, training=True))

    return lambda: Own([keras.Input((4,)), *dense_model().layers])


def compiled_with(loss):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": loss}


@pytest.fixture(autouse=True)
def _tells_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.every_case
@pytest.mark.parametrize("way", ["steps", "both"])
@pytest.mark.parametrize("name", LOSSES)
def test_steps_of_ones_own_match_the_full_batch(name, way):
    make = step_of(LOSSES[name])
    found = difference_of_fits(make, compiled_with(None), later(), epochs=1, **WAYS[way])
    assert found <= LIMIT


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "with_penalty"])
def test_compiled_losses_match_the_full_batch(name, way):
    arguments = compiled_with(LOSSES[name])
    found = difference_of_fits(dense_model, arguments, later(), epochs=1, **WAYS[way])
    assert found <= LIMIT


def of_two():
    x = keras.Input((4,))
    outputs = {name: layers.Dense(2, name=name)(x) for name in ("a", "b")}
    return keras.Model(x, outputs)


def other(y, z):
    mask = (y[:, 1] > 0).float()
    return (mask * torch.square(z - y).mean(1)).sum() / mask.sum()


def test_two_losses_with_different_masks_match_where_a_batch_is_split():
    x, y = dense_data(36)
    arguments = compiled_with({"a": quotient, "b": other})
    data = (x, {"a": y, "b": y[:, ::-1].copy()})
    assert difference_of_fits(of_two, arguments, data, rows=12, size=5) <= LIMIT


def test_a_second_loss_that_is_found_out_later_is_an_error():
    x, y = later(24, plain=12)
    arguments = compiled_with({"a": quotient, "b": "mse"})
    with pytest.raises(ValueError, match="gradients of a microbatch are not"):
        train(of_two, arguments, (x, {"a": y, "b": y}), rows=12, microbatch_size=4)


def at_least_one(y, z):
    mask = mask_of(y)
    return (mask * torch.square(z - y).mean(1)).sum() / mask.sum().clamp(min=1.0)


def shared(y, z):
    mask = mask_of(y)
    return mask * torch.square(z - y).mean(1) / mask.mean()


def test_values_that_are_divided_by_another_number_later_are_told_of():
    x, y = dense_data(60)
    y[:40, 0] = np.abs(y[:40, 0])
    y[40:, 0] = np.arange(20) % 3 - 1.0
    with pytest.raises(UserWarning, match="gradients of a microbatch are not"):
        train(dense_model, compiled_with(shared), (x, y), rows=4, accumulation_steps=3, epochs=1)


def test_a_bound_that_is_reached_is_an_error():
    """In a microbatch without samples that count it would be counted as one."""
    with pytest.raises(RuntimeError, match="neither those of a mean nor"):
        train(step_of(at_least_one), compiled_with(None), later(), rows=4, accumulation_steps=3)
    with pytest.raises(ValueError, match="gradients of a microbatch are not"):
        train(dense_model, compiled_with(at_least_one), later(), rows=12, microbatch_size=4)


def test_control_counting_samples_would_be_seen(monkeypatch):
    monkeypatch.setattr(Divided, "weight", lambda self, divisors: 1.0)
    make = step_of(quotient)
    found = difference_of_fits(make, compiled_with(None), dense_data(24), rows=6, steps=2)
    assert found > 1e-2


def test_logs_of_a_split_batch_are_those_of_the_full_batch():
    arguments = compiled_with(quotient)
    logs = [
        train(dense_model, arguments, later(), rows=12, epochs=1, **settings)[0].history.history
        for settings in ({}, {"microbatch_size": 4})
    ]
    np.testing.assert_allclose(logs[1]["loss"], logs[0]["loss"], rtol=1e-5)


def test_what_lies_in_the_model_is_not_looked_at():
    weight = torch.ones(3, 2, requires_grad=True)
    x = torch.ones(4, 3) / 2.0
    hidden = (x @ weight) / torch.tensor(7.0)
    loss = torch.square(hidden).sum() / torch.tensor(5.0) + hidden.mean()
    assert sorted(divisors_of(loss)) == [5.0, 7.0, 8.0]
    scaled = hidden * torch.ones(2, requires_grad=True)
    assert divisors_of(scaled.sum() / torch.tensor(5.0)) == [5.0]
    assert divisors_of(loss, [hidden]) == [8.0, 5.0] or divisors_of(loss, [hidden]) == [5.0, 8.0]


def test_processes_do_not_divide_by_numbers_that_each_finds_for_itself():
    watch = Watch(prefers_divisors=True, takes_divisors=False)
    tried = Tried([3.0], [1.0], [2.0], rows=4)
    assert watch.kind_of(lambda factors: factors != [0.5, 0.5], tried, 4, 2) == "sum"
    assert watch.kind_of(lambda factors: factors == [1 / 3, 2 / 3], tried, 4, 2) == "other"


def test_a_watch_asks_only_where_numbers_are_others_for_each_sample():
    watch = Watch(prefers_divisors=False)
    tried = Tried([8.0, 3.0, 6.0], [4.0, 3.0, 2.0], [4.0, 3.0, 4.0], rows=8)
    assert not watch.has_changed([1.0], 8)  # nothing was tried
    assert watch.kind_of(lambda factors: factors == [0.5, 0.5], tried, 8, 4) == "mean"
    assert not watch.has_changed([4.0, 3.0, 3.0], 4)
    assert watch.has_changed([4.0, 3.0, 2.0], 4)
    assert watch.has_changed([4.0], 4)
    changed = Tried([8.0, 3.0, 4.0], [4.0, 3.0, 1.0], [4.0, 3.0, 3.0], rows=8)
    found = watch.kind_of(lambda factors: factors == [0.25, 0.75], changed, 8, 4)
    assert found == Divided(2, 0.75)
    assert found.weight([8.0, 3.0, 1.5]) == 2.0
    assert found.weight([8.0]) is None
