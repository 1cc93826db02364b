"""On PyTorch, the package imports no TensorFlow, and what it cannot do it refuses by name."""

import keras
import numpy as np
import pytest
import torch
from helpers import dense_data, dense_model, seeded, sequential

from ga_model import GradientAccumulator, accumulate
from ga_model.bench import _measure
from ga_model.bench._cases import CASES, Case, random_data
from ga_model.cli._main import main
from ga_model.demo import _report, _run
from ga_model.demo._options import Settings


def test_a_compiled_step_is_refused():
    """Also where it was compiled so before: else see the suite."""
    plain = dense_model()
    plain.compile("sgd", "mse", jit_compile=True)
    model = accumulate(plain, microbatch_size=3)
    with pytest.raises(ValueError, match=r"(?s)observe a step that.*jit_compile=True.*=False"):
        model.fit(*dense_data(6), verbose=0)


def test_commands_say_what_needs_tensorflow(monkeypatch, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    for words, text in {
        "demo --dtype float64": "Received: --dtype float64 with KERAS_BACKEND=torch.",
        "bench --jit on": "--jit is for the TensorFlow backend: on PyTorch no step is compiled.",
    }.items():
        assert main(words.split()) == 2
        assert text in capsys.readouterr().err


def test_the_demonstration_trains_alike(monkeypatch):
    x, y = np.random.default_rng(0).random((20, 8, 8, 1), "float32"), np.arange(20) % 10
    monkeypatch.setattr(_run, "load_dataset", lambda settings: ((x, y), (x, y)))
    settings = Settings(batch_size=8, accumulation_steps=2, epochs=1, optimizer="sgd")
    results = [_run.train(run, settings) for run in _run.make_runs(settings)]
    assert [result.updates for result in results] == [3, 3, 3, 5]
    assert _report.judge(results, "float32")[0]


@pytest.mark.parametrize("way", _measure.WAYS)
def test_ways_of_the_benchmark_update_where_they_are_to(way, monkeypatch):
    def make():
        return sequential((4,), keras.layers.Dense(10, "softmax"))

    monkeypatch.setitem(CASES, "small", Case(make, keras.optimizers.SGD, random_data(4), 3))
    setup = _measure.Setup("small", False, way, 1 if way == _measure.SMALL else 2)
    training = _measure.Training(setup)
    changes = []
    for _ in range(2):
        before = training.model.get_weights()
        assert training.run(setup.microbatches if setup.is_window else 1) > 0.0
        changes.append(any(map(np.any, map(np.subtract, training.model.get_weights(), before))))
    is_by_window = way in (_measure.KERAS, _measure.HAND, _measure.STEPS)
    assert changes == [not is_by_window, True]


# Loops of the user's own.


def test_a_weight_may_have_a_gradient():
    """Which PyTorch would warn of, as it becomes a number."""
    (variable, *_) = seeded(dense_model).trainable_variables
    accumulator = GradientAccumulator()
    ones = torch.ones(tuple(variable.shape))
    accumulator.add([ones], [variable], weight=torch.tensor(3.0, requires_grad=True))
    accumulator.add([-ones], [variable], weight=keras.Variable(1.0))
    (mean,) = accumulator.mean()
    np.testing.assert_allclose(mean.numpy(), 0.5, rtol=1e-6)
