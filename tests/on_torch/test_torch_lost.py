"""On PyTorch, a microbatch that a loss loses as it is divided by zero is told of, once an epoch."""

import warnings

import keras
import numpy as np
import pytest
from helpers import (
    LIMIT,
    dense_data,
    dense_model,
    seeded,
    told,
)
from keras import ops
from torch_step import Step, torch
from training import difference_of_fits

from ga_model import accumulate

SAYS = "was zero in a microbatch because it was divided by zero"
WAYS = {
    "steps": {"accumulation_steps": 3},
    "size": {"microbatch_size": 4},
    "both": {"accumulation_steps": 2, "microbatch_size": 4},
}
every_way = pytest.mark.parametrize("way", WAYS)


def counts(y):
    return ops.cast(y[:, 0] > -0.3, "float32")


def of_all_over_some(y, z):
    return ops.divide_no_nan(ops.sum(ops.square(z - y)), ops.sum(counts(y)))


def of_all_over_some_unsafe(y, z):
    return ops.sum(ops.square(z - y)) / ops.sum(counts(y))


def each_of_all_over_some(y, z):
    return ops.sum(ops.divide_no_nan(ops.square(z - y), ops.sum(counts(y))))


def each_of_all_over_some_unsafe(y, z):
    return ops.sum(ops.mean(ops.square(z - y), 1) / ops.sum(counts(y)))


def of_all_in_one_branch(y, z):
    number = ops.sum(counts(y))
    return torch.where(number > 0, (torch.square(z - y) / number).sum(), 0.0)


def scaled_in_one_branch(y, z):
    number = ops.sum(counts(y))
    return torch.where(number > 0, 0.5 * (torch.square(z - y).sum() / number), 0.0)


def in_one_branch_of_several(y, z):
    number = ops.sum(counts(y))
    return torch.where(number > 0, torch.square(z - y).sum() / number, torch.zeros(2)).mean()


def without_infinity(y, z):
    return torch.nan_to_num(torch.square(z - y).sum() / ops.sum(counts(y)), posinf=0.0)


def signed(y, z):
    """The first column weighs, by numbers of both signs where it is -0.3 or less."""
    weights = ops.where(y[:, 0] > -0.3, 1.0, y[:, 1])
    return ops.divide_no_nan(ops.sum(weights * ops.mean(ops.square(z - y), 1)), ops.sum(weights))


def of_some_over_some(y, z):
    errors = counts(y) * ops.mean(ops.square(z - y), 1)
    return ops.divide_no_nan(ops.sum(errors), ops.sum(counts(y)))


def each_over_some(y, z):
    """What is divided is not zero, but nothing of it is selected afterwards."""
    return ops.sum(ops.square(z - y).mean(1) / ops.sum(counts(y)) * counts(y))


def each_over_some_safe(y, z):
    quotients = ops.divide_no_nan(ops.square(z - y).mean(1), ops.sum(counts(y)))
    return ops.sum(quotients * counts(y))


def selected(y, z):
    return torch.square(z - y)[counts(y) > 0].mean()


def of_classes(y, z):
    labels = torch.where(counts(y) > 0, (y[:, 0] > 0.4).long(), -100)
    return torch.nn.functional.cross_entropy(z, labels)  # which ignores -100


LOST = {
    loss.__name__: loss
    for loss in (
        of_all_over_some,
        of_all_over_some_unsafe,
        each_of_all_over_some,
        each_of_all_over_some_unsafe,
        of_all_in_one_branch,
        scaled_in_one_branch,
        in_one_branch_of_several,
        without_infinity,
        signed,
    )
}
EXACT = {
    f.__name__: f
    for f in (of_some_over_some, each_over_some, each_over_some_safe, selected, of_classes)
}


def data(num_empty=4):
    """Return samples, of which those from the 28th on do not count."""
    x, y = dense_data(48)
    y[:, 0] = np.abs(y[:, 0])
    y[28 : 28 + num_empty, 0] = -1.0
    y[28 : 28 + num_empty, 1] = np.resize([1.0, -1.0, 2.0, -2.0], num_empty)
    return x, y


def step_of(loss):
    class Own(Step):
        def forward_loss(self, x, y):
            return loss(y, self(x, training=True))

    return Own([keras.Input((4,)), *dense_model().layers])


def told_by_fit(model, **arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(shuffle=False, verbose=0, **arguments)
    return told(caught)


def said_of(model, way, samples, loss=None):
    """Return what two epochs tell."""
    model = accumulate(model, **WAYS[way])
    model.compile(keras.optimizers.SGD(0.1), loss)
    size = 4 if way == "steps" else 12 if way == "size" else 8
    arguments = dict(zip(("x", "y", "sample_weight"), samples))
    return told_by_fit(model, batch_size=size, epochs=2, **arguments)


@pytest.mark.every_case
@every_way
@pytest.mark.parametrize("name", LOST)
def test_a_compiled_loss_is_told_of(name, way):
    (said,) = said_of(seeded(dense_model), way, data(), LOST[name])
    assert SAYS in said


@pytest.mark.every_case
@pytest.mark.parametrize("name", LOST)
def test_the_loss_of_a_step_is_told_of(name):
    (said,) = said_of(seeded(lambda: step_of(LOST[name])), "steps", data())
    assert SAYS in said


@pytest.mark.every_case
@every_way
@pytest.mark.parametrize("name", EXACT)
def test_nothing_that_counts_is_not_told_of(name, way):
    assert not said_of(seeded(dense_model), way, data(), EXACT[name])
    if way == "steps":
        assert not said_of(seeded(lambda: step_of(EXACT[name])), way, data())


@pytest.mark.parametrize("name", ["compiled", "step"])
def test_a_safe_quotient_of_which_nothing_counts_matches_the_full_batch(name):
    is_step = name == "step"
    make = (lambda: step_of(of_some_over_some)) if is_step else dense_model
    arguments = {"loss": None if is_step else of_some_over_some}
    found = difference_of_fits(
        make,
        lambda: {"optimizer": keras.optimizers.SGD(0.1), **arguments},
        data(),
        rows=4,
        steps=3,
    )
    assert found <= LIMIT


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["of_all_over_some", "of_some_over_some"])
def test_a_window_without_weight_is_not_told_of(name):
    """It makes an update with gradients of zero, as plain Keras does."""
    x, y = data(12)
    y = np.concatenate([y[:24], y[28:40]])
    assert not said_of(seeded(dense_model), "steps", (x[:36], y), EXACT.get(name) or LOST[name])


@pytest.mark.every_case
@every_way
@pytest.mark.parametrize("weights", [[1, -1, 2, -2], [0, 0, 0, 0], [0.1, 0.2, -0.3, 0]])
def test_sample_weights_that_cancel_are_told_of(weights, way):
    x, y = dense_data(48)
    of_samples = np.ones(48, "float32")
    of_samples[28:32] = weights
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    said = said_of(seeded(dense_model), way, (x, y, of_samples), loss)
    assert [SAYS in text for text in said] == [True] * (weights != [0, 0, 0, 0])


def test_where_the_microbatch_is_the_batch_it_is_not_told_of():
    model = accumulate(seeded(dense_model), skip_nonfinite=True)
    model.compile("sgd", of_all_over_some)
    x, y = data()
    assert not told_by_fit(model, x=x, y=y, batch_size=4)


def test_a_microbatch_that_is_left_out_is_not_told_of():
    x, y = data()
    x[28] = np.nan
    model = accumulate(seeded(dense_model), accumulation_steps=3, skip_nonfinite=True)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile("sgd", loss)
    weights = np.ones(48, "float32")
    weights[28:32] = [1, -1, 2, -2]
    arguments = {"sample_weight": weights, "batch_size": 4}
    (said,) = told_by_fit(model, x=x, y=y, **arguments)
    assert "were skipped" in said


def test_it_is_told_of_at_the_end_of_the_epoch():
    model = accumulate(seeded(dense_model), accumulation_steps=3)
    model.compile("sgd", of_all_over_some)
    x, y = data()
    order = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: order.append(model._accumulation.num_lost)
    )
    (said,) = told_by_fit(model, x=x, y=y, batch_size=4, callbacks=[callback])
    assert SAYS in said
    assert order[:8] == [None] * 8
    assert order[8:] == [1] * 4
