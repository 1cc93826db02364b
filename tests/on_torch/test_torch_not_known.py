"""On PyTorch, training goes on where what reads graphs and tries models does not know something."""

import warnings

import keras
import numpy as np
import pytest
from ga_model.torch_engine import (
    _divisors,
    _gradient_hooks,
    _own_gradients,
    _probes,
    _run,
    _tensors,
    _torch_call_checks,
    _torch_split_call,
)
from helpers import (
    LIMIT,
    relative_difference,
    seeded,
)
from keras import layers, ops
from torch_step import torch

from ga_model import accumulate


def mean_of_positives(y, y_pred):
    mask = ops.cast(y > 0, "float32")
    return ops.sum(mask * ops.square(y - y_pred)) / ops.sum(mask)


def model():
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
    )


def trained(rows, loss, **settings):
    net = seeded(model)
    if settings:
        net = accumulate(net, **settings)
    net.compile(keras.optimizers.SGD(0.1), loss)
    start = net.get_weights()
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(16, 3)), generator.normal(size=(16, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        net.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return start, net.get_weights(), [str(w.message) for w in caught]


READERS = [
    (_divisors, "divisor_of"),
    (_divisors, "takes_leaf"),
    (_own_gradients, "nodes_of"),
    (_own_gradients, "function_of"),
    (_gradient_hooks, "hooks_on_gradient"),
    (_gradient_hooks, "has_hooks_on_calls"),
    (_gradient_hooks, "has_hooks_on_gradients"),
    (_tensors, "norms_of"),
    (_probes.ModelProbe, "__init__"),
    (_probes, "_gradients"),
    (_torch_call_checks, "_leaves_of"),
    (_torch_split_call, "Tensors"),
    (_torch_split_call, "random_state"),
    (_run, "weights_ahead"),
]


@pytest.mark.every_case
@pytest.mark.parametrize("loss", ["mse", mean_of_positives], ids=["mse", "own"])
@pytest.mark.parametrize("error", [KeyError, AttributeError, IndexError])
@pytest.mark.parametrize(("owner", "name"), READERS, ids=[name for _, name in READERS])
def test_a_reader_that_fails_is_no_error_of_the_users(monkeypatch, owner, name, error, loss):
    start, expected, _ = trained(16, loss)

    def fails(*args, **kwargs):
        raise error(name)

    monkeypatch.setattr(owner, name, fails)
    _, weights, _ = trained(16, loss, microbatch_size=4)
    assert relative_difference(weights, expected, start) <= LIMIT
    _, weights, said = trained(8, loss, accumulation_steps=2)
    assert relative_difference(weights, expected, start) <= LIMIT or said


def test_a_loss_that_takes_no_half_of_a_microbatch_sees_the_full_batch():
    def by_fours(y, y_pred):
        return ops.mean(ops.square(ops.reshape(y - y_pred, (-1, 4))))

    start, expected, _ = trained(16, by_fours)
    _, weights, _ = trained(16, by_fours, microbatch_size=4)
    assert relative_difference(weights, expected, start) <= LIMIT


def test_memory_that_is_used_up_is_no_reading_that_failed():
    @_divisors.otherwise(None)
    def reading():
        raise torch.cuda.OutOfMemoryError("out of memory")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        reading()
