"""On PyTorch, the package imports no TensorFlow, and what it cannot do it refuses by name."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import dense_data, dense_model, relative_difference, seeded
from keras import ops
from pairs import TOLERANCE
from torch_step import torch

import ga_model
from ga_model import GradientAccumulator, accumulate
from ga_model.bench import _bench
from ga_model.bench._bench_cases import random_numbers
from ga_model.demo import _demo, _report
from ga_model.demo._batches import ShuffledBatches
from ga_model.demo._options import Settings


def test_importing_and_training_imports_no_tensorflow():
    code = (
        "import sys, numpy as np\n"
        "sys.modules['tensorflow'] = None\n"  # to import it would fail
        "import ga_model, keras\n"
        "from ga_model import *\n"
        "model = accumulate(keras.Sequential([keras.layers.Dense(1)]), microbatch_size=2)\n"
        "model.compile('sgd', 'mse', accumulation_steps=2)\n"
        "model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)\n"
        "print(*(m for m in sys.modules if m.split('.')[0] in ('tensorflow', 'jax')))\n"
    )
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["tensorflow"]  # the None above


def test_all_names_are_there():
    for name in ga_model.__all__:
        assert getattr(ga_model, name) is not None


def of_two():
    return keras.optimizers.SGD(gradient_accumulation_steps=2)


def test_a_compiled_step_is_refused():
    model = accumulate(dense_model(), microbatch_size=3)
    with pytest.raises(ValueError, match=r"(?s)Received: .*jit_compile=False"):
        model.compile("sgd", "mse", jit_compile=True)
    plain = dense_model()
    plain.compile("sgd", "mse", jit_compile=True)
    model = accumulate(plain, microbatch_size=3)
    with pytest.raises(ValueError, match=r"(?s)Received: .*jit_compile=False"):
        model.fit(*dense_data(6), verbose=0)


def test_an_optimizer_that_accumulates_itself_is_refused():
    model = accumulate(dense_model(), accumulation_steps=2)
    with pytest.raises(ValueError, match="accumulated twice"):
        model.compile(of_two(), "mse")


def test_a_refused_setting_leaves_the_model_as_it_was():
    model = accumulate(dense_model(), microbatch_size=3)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="must be an integer"):
        model.microbatch_size = 0
    assert model.microbatch_size == 3


def test_several_processes_without_a_choice_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    model = accumulate(seeded(dense_model), microbatch_size=3)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="whether they train together"):
        model.train_on_batch(*dense_data(6))


def test_variables_that_gradients_overwrite_are_refused():
    model = accumulate(seeded(dense_model), microbatch_size=3)
    model.compile("sgd", "mse")
    model.trainable_variables[0].overwrite_with_gradient = True
    with pytest.raises(ValueError, match="float8"):
        model.train_on_batch(*dense_data(6))


def said_by_command(capsys, *words):
    from ga_model.cli._cli import main

    try:
        status = main(words)
    except SystemExit as error:
        status = error.code
    return status, capsys.readouterr().err


def test_commands_say_what_needs_tensorflow(monkeypatch, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    for words, said in (
        (["demo", "--dtype", "float64"], "Received: it on another one."),
        (["bench", "--jit", "on"], "Received: --jit on with KERAS_BACKEND=torch."),
    ):
        status, error = said_by_command(capsys, *words)
        assert status == 2
        assert said in error
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert "Received: KERAS_BACKEND='jax'" in said_by_command(capsys, "bench")[1]


def test_batches_of_the_demonstration_come_in_one_order():
    x, y = np.arange(10.0), np.arange(10)
    orders = []
    for size in (3, 5):
        batches = ShuffledBatches(x, y, size, 1)
        orders.append([])
        for _ in range(2):
            orders[-1].append(np.concatenate([y for _, y in batches]).tolist())
            batches.on_epoch_end()
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == list(range(10))


def test_the_demonstration_trains_alike(monkeypatch):
    x, y = np.random.default_rng(0).random((20, 8, 8, 1), "float32"), np.arange(20) % 10
    monkeypatch.setattr(_demo, "load_dataset", lambda settings: _demo.Dataset(x, y, x, y))
    settings = Settings(batch_size=8, accumulation_steps=2, epochs=1, optimizer="sgd")
    results = [_demo.train(run, settings) for run in _demo.make_runs(settings)]
    assert [result.updates for result in results] == [3, 3, 3, 5]
    assert _report.judge(results, "float32").is_reproduced


@pytest.mark.every_case
@pytest.mark.parametrize("way", _bench.WAYS)
def test_ways_of_the_benchmark_update_where_they_are_to(way):
    number = 2
    case = _bench.Case(
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(10, "softmax")]),
        keras.optimizers.SGD,
        random_numbers(4),
        3,
    )
    training = _bench.Training(case, False, way, number)
    changes = []
    for _ in range(number):
        before = training.model.get_weights()
        assert training.run(number if training.rows == 6 else 1) > 0.0
        changes.append(any(map(np.any, map(np.subtract, training.model.get_weights(), before))))
    once = [False, True]
    expected = dict.fromkeys((_bench.KERAS, _bench.HAND, _bench.STEPS), once)
    expected[_bench.FLOOR] = [False] * 2
    assert changes == expected.get(way, [True] * 2)


# Loops of the user's own.


def gradients_of(model, x, y, reduce=ops.mean):
    model.zero_grad()
    reduce(ops.square(ops.subtract(model(x, training=True), y))).backward()
    return [v.value.grad for v in model.trainable_variables]


@pytest.mark.every_case
@pytest.mark.parametrize("reduce", [ops.mean, ops.sum])
def test_an_own_loop_matches_the_full_batch(reduce):
    x, y = dense_data(22)
    models = [seeded(dense_model) for _ in range(2)]
    optimizers = [keras.optimizers.SGD(0.01, momentum=0.9) for _ in models]
    start = models[0].get_weights()
    accumulator = GradientAccumulator()
    for first in range(0, 22, 12):
        part = slice(first, min(first + 12, 22))
        variables = models[0].trainable_variables
        optimizers[0].apply(gradients_of(models[0], x[part], y[part], reduce), variables)
        variables = models[1].trainable_variables
        for begin in range(part.start, part.stop, 5):
            rows = slice(begin, min(begin + 5, part.stop))
            weight = rows.stop - rows.start if reduce is ops.mean else None
            gradients = gradients_of(models[1], x[rows], y[rows], reduce)
            accumulator.add(gradients, variables, weight=weight)
        accumulator.apply(optimizers[1])
        accumulator.apply(optimizers[1])
    assert int(optimizers[1].iterations) == 2
    weights = [model.get_weights() for model in models]
    assert relative_difference(weights[1], weights[0], start) <= TOLERANCE


def test_an_accumulator_refuses_what_it_cannot_add():
    model = seeded(dense_model)
    variables = model.trainable_variables
    gradients = [torch.ones(tuple(v.shape)) for v in variables]
    accumulator = GradientAccumulator()
    with pytest.raises(ValueError, match="one gradient for each variable"):
        accumulator.add(gradients[:1], variables, weight=1)
    with pytest.raises(ValueError, match="the shape of its variable"):
        accumulator.add(gradients[::-1], variables, weight=1)
    with pytest.raises(ValueError, match="must be a scalar number"):
        accumulator.add(gradients, variables, weight="all")
    with pytest.raises(TypeError, match="takes a Keras optimizer"):
        accumulator.apply("sgd")
    accumulator.add(gradients, variables, weight=2)
    with pytest.raises(ValueError, match="or None in every one"):
        accumulator.add(gradients, variables, weight=None)
    with pytest.raises(ValueError, match="must belong to the same variables"):
        accumulator.add(gradients[:2], variables[:2], weight=1)
    assert repr(accumulator) == "<GradientAccumulator: 1 microbatches, 4 variables>"
    accumulator.reset()
    assert accumulator.variables == []


def test_a_microbatch_without_weight_counts_for_nothing():
    model = seeded(dense_model)
    variables = model.trainable_variables
    accumulator = GradientAccumulator()
    nan = [torch.full(tuple(v.shape), float("nan")) for v in variables]
    ones = [torch.ones(tuple(v.shape)) for v in variables]
    accumulator.add(nan, variables, weight=0)
    accumulator.add(ones, variables, weight=3)
    for mean in accumulator.mean():
        np.testing.assert_array_equal(mean.numpy(), 1.0)


@pytest.mark.parametrize("convert", [np.asarray, np.ndarray.tolist])
def test_gradients_may_be_arrays(convert):
    model = seeded(dense_model)
    variables = model.trainable_variables
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=v.shape) for v in variables]
    accumulator = GradientAccumulator()
    given = [convert(array) for array in arrays]
    accumulator.add([None, *given[1:]], variables, weight=1)
    accumulator.add(given, variables, weight=3)
    means = accumulator.mean()
    assert [mean.dtype for mean in means] == [torch.float32] * len(variables)
    np.testing.assert_allclose(means[0].numpy(), 0.75 * arrays[0], rtol=1e-6)
    for mean, array, one in zip(means[1:], arrays[1:], given[1:], strict=True):
        np.testing.assert_allclose(mean.numpy(), array, rtol=1e-6)
        np.testing.assert_array_equal(one, array)  # as they were


@pytest.mark.parametrize("gradient", ["all", object(), np.zeros((4, 6), complex), [[1], [1, 2]]])
def test_gradients_that_are_no_numbers_are_refused_by_name(gradient):
    (variable, *_) = seeded(dense_model).trainable_variables
    accumulator = GradientAccumulator()
    text = f"(?s)must be a tensor, an array of real numbers or None.* for {variable.path!r}"
    with pytest.raises(TypeError, match=text):
        accumulator.add([gradient], [variable], weight=1)
    assert accumulator.num_microbatches == 0


def test_a_weight_may_have_a_gradient():
    """Which PyTorch would warn of, as it becomes a number."""
    (variable, *_) = seeded(dense_model).trainable_variables
    accumulator = GradientAccumulator()
    ones = torch.ones(tuple(variable.shape))
    accumulator.add([ones], [variable], weight=torch.tensor(3.0, requires_grad=True))
    accumulator.add([-ones], [variable], weight=keras.Variable(1.0))
    (mean,) = accumulator.mean()
    np.testing.assert_allclose(mean.numpy(), 0.5, rtol=1e-6)
