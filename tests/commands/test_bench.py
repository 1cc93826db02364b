"""`python -m ga_model bench`: that it measures what it says, and prints what it measured."""

import json
import os
import signal
import sys

import keras
import numpy as np
import psutil
import pytest
from helpers import run_python, sequential
from keras import layers

from ga_model import AccumulatingModel
from ga_model.bench import _measure, _report
from ga_model.bench._cases import CASES, Case, Sizes, random_data, trained_cases
from ga_model.bench._measure import (
    FULL,
    HAND,
    KERAS,
    RECOMPUTING,
    SIZE,
    SMALL,
    STEPS,
    TRIED,
    WAYS,
    Result,
    Setup,
)
from ga_model.bench._names import NAMES, TRAINED_NAMES
from ga_model.cli._main import main
from ga_model.tools._memory import give_back_freed_memory, held_memory, peak_memory
from ga_model.tools._process import ProcessError, in_own_process

OPTIONS = ["--models", "embedding", "--microbatches", "2", "1", "--minutes", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The command's output, what it wrote as JSON, by setup, and its plot."""
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", folder / "bench.json", "--plot", folder / "bench.png"]
    printed, errors = run_python("-m", "ga_model", "bench", *OPTIONS, *files)
    said = set(errors.splitlines())  # what it is at
    assert {f"memory: embedding, {way}" for way in WAYS} | {"time: embedding"} <= said
    parts = json.loads((folder / "bench.json").read_text())
    measured = {Setup(*map(part.pop, Setup._fields)): Result(**part) for part in parts}
    return printed, measured, folder / "bench.png"


@pytest.mark.gate
def test_the_table_shows_what_was_measured(run):
    printed, measured, _ = run
    own = [STEPS, TRIED, SIZE, RECOMPUTING]
    pairs = [(SMALL, 1), *((w, 1) for w in own), *((w, 2) for w in WAYS[1:])]
    assert list(measured) == [Setup("embedding", False, *pair) for pair in pairs]
    rounds = len(measured[Setup("embedding", False, SMALL, 1)].seconds_per_sample)
    assert rounds >= 3
    assert printed.startswith(f"embedding: microbatches of 64 samples, XLA off, {rounds} rounds")
    assert printed == f"{_report.tables(measured)}\n"
    for setup, result in measured.items():
        has_memory = setup.microbatches == 2 or setup.way == SMALL
        assert (result.bytes_of_peak_memory is not None) == has_memory
        assert result.seconds_of_first_call > 0.0


@pytest.mark.gate
def test_memory_is_that_of_the_training_alone(run):
    """The table takes 25.6 MB, and Keras's accumulation a copy of it."""
    size = 4 * (200_000 * 32 + 33 * 64 + 65 * 10)
    sizes = {s.way: r.bytes_of_peak_memory for s, r in run[1].items() if r.bytes_of_peak_memory}
    assert size <= sizes[SMALL] < 4 * size
    assert 0.5 * size < sizes[KERAS] - sizes[SMALL] < 3 * size
    assert run[2].read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def small_case(monkeypatch):
    def make_model():
        return sequential((4,), layers.Dense(10, "softmax"))

    monkeypatch.setitem(CASES, "small", Case(make_model, keras.optimizers.SGD, random_data(4), 2))
    return CASES["small"]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_does_what_it_is_called(way, small_case):
    """Of four microbatches, how many calls it takes, and after which the weights change."""
    setup = Setup("small", False, way, 1 if way == SMALL else 4)
    number = setup.microbatches if setup.is_window else 1
    training, changes = _measure.Training(setup), []
    for _ in range(4):
        before = training.model.get_weights()
        training.run(number)
        changes.append(any(map(np.any, map(np.subtract, training.model.get_weights(), before))))
    assert changes == ([False] * 3 + [True] if way in (KERAS, HAND, STEPS, TRIED) else [True] * 4)
    assert len(next(training._batches)[0]) == number * small_case.rows
    like = _measure.Training(Setup("small", False, way, 2), training)
    if way in (STEPS, TRIED, SIZE, RECOMPUTING, FULL):
        before = int(training.model.optimizer.iterations)
        like.run(4)
        assert int(training.model.optimizer.iterations) == before + 2


def test_a_loop_by_hand_trains_as_accumulation_steps_do(small_case):
    weights = []
    for way in (HAND, STEPS):
        training = _measure.Training(Setup("small", False, way, 4))
        training.run(8)
        weights.append(training.model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


SMALL_MODELS = dict(zip(TRAINED_NAMES, trained_cases(Sizes(1, 32, 8, 50)), strict=True))


@pytest.mark.gate
@pytest.mark.parametrize("way", [STEPS, RECOMPUTING])
@pytest.mark.parametrize("name", TRAINED_NAMES[::-1])
@pytest.mark.filterwarnings("ignore:A window of microbatches does not train:UserWarning")
def test_the_models_that_people_train_are_trained(name, way, monkeypatch):
    monkeypatch.setitem(CASES, name, SMALL_MODELS[name])
    training = _measure.Training(Setup(name, False, way, 2))
    before = training.model.get_weights()
    training.run(2)
    assert any(not np.array_equal(*pair) for pair in zip(before, training.model.get_weights()))


def test_models_of_keras_hub_are_refused_without_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    assert main(["bench", "--models", "dense", "gpt2"]) == 2
    assert "keras-hub is not installed, which makes the models gpt2. " in capsys.readouterr().err


@pytest.fixture
def clock(monkeypatch, small_case):
    """A clock in a list, which a second passes on per sample that is trained on, and by itself."""
    now = [0.0]

    def make_function(model, *_):
        def train(iterator):
            now[0] += len(next(iterator)[0])

        model.train_function = train
        return train

    for model in (keras.Model, AccumulatingModel):
        monkeypatch.setattr(model, "make_train_function", make_function)
    monkeypatch.setattr(_measure, "loop_by_hand", make_function)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(_measure.time, name, lambda: now[0])
    monkeypatch.setattr(_measure, "in_own_process", lambda name, function, *args: function(*args))
    monkeypatch.setattr(_measure, "prepare", lambda: None)  # for such processes
    return now


def test_times_are_those_of_a_sample(clock):
    times = _measure.measure_times(_measure.setups("small", False, [1, 3, 4]), 1e6)
    assert len(times) == 1 + 4 + 7 + 7
    assert {len(per_sample) for _, per_sample in times.values()} == {_measure._MOST_ROUNDS}
    assert {value for _, per_sample in times.values() for value in per_sample} == {1.0}


@pytest.mark.parametrize("seconds", [1500.0, 40.0, 1.0, 400.0, 20_000.0])
def test_the_benchmark_ends_when_its_time_is_up(clock, monkeypatch, seconds):
    """Apart from the step that runs, however long all of it would take."""
    monkeypatch.setattr(_measure, "measure_memory", lambda setup: clock.append(clock.pop() + 20.0))
    monkeypatch.setattr(_measure.os, "cpu_count", lambda: 1)
    monkeypatch.setitem(CASES, "tiny", CASES["small"])
    results = _measure.measure(["small", "tiny"], [4, 16], [False], seconds)
    window = 16 * CASES["small"].rows
    assert clock[0] <= seconds + window
    for model in ("small", "tiny"):
        rounds = [len(r.seconds_per_sample) for s, r in results.items() if s.model == model]
        assert min(rounds) <= max(rounds) <= min(rounds) + 1
        assert (max(rounds) > 0) == (seconds >= 1500.0)
        assert (min(rounds) == _measure._MOST_ROUNDS) == (seconds == 20_000.0)
    table = _report.tables(results)
    assert table.count(" rounds\n") == 2
    assert "no time was left for" in table


def test_the_benchmark_takes_ten_minutes_by_default(monkeypatch):
    given = []
    monkeypatch.setattr(_measure, "measure", lambda *args: given.append(args) or {})
    assert main(["bench"]) == 0
    assert given == [(list(NAMES[:4]), [8], [False], 600.0)]


def made_up():
    results = {}
    for model in ("dense", "embedding"):
        for jit in (False, True):
            for setup in _measure.setups(model, jit, [1, 16]):
                size = {FULL: 200, SIZE: 300}.get(setup.way, 100) * 10**6
                is_told = not jit and (setup.way == SMALL or setup.microbatches == 16)
                results[setup] = Result([1.0, 2.0, 4.0, 8.0], 1.0, size if is_told else None)
            # The ratios are 0.5, 0.5, 2 and 2.
            results[Setup(model, jit, STEPS, 16)].seconds_per_sample = [0.5, 1.0, 8.0, 16.0]
            results[Setup(model, jit, FULL, 16)].seconds_per_sample = [0.5, 1.0, 2.0]
    return results


def test_ratios_are_medians_over_rounds_of_the_same_round():
    results = made_up()
    steps, full = (Setup("dense", False, way, 16) for way in (STEPS, FULL))
    assert _report.time_ratio(results, steps) == (1.25, 0.75)
    assert _report.time_ratio(results, steps, FULL) == (1.0, 0.75)  # 1, 1 and 4
    assert _report.time_ratio(results, full) == (0.5, 0.0)
    assert _report.time_ratio(results, Setup("dense", False, SIZE, 1), FULL) == (1.0, 0.0)
    lines = [" ".join(line.split()) for line in _report.tables(results).splitlines()]
    assert f"{SMALL} 1 100% 1.0 s 100 MB 50%" in lines
    assert f"{STEPS} 16 125% +-75% 100% +-75% 1.0 s 100 MB 50%" in lines
    assert f"{STEPS} 1 100% 100% 1.0 s - -" in lines
    assert f"{SIZE} 16 100% 200% 1.0 s 300 MB 150%" in lines
    results[steps].seconds_per_sample = []
    assert _report.time_ratio(results, steps) is None
    for result in results.values():  # as when the time is up
        result.bytes_of_peak_memory = None
    assert "MB" not in _report.tables(results)
    _report.draw(results)


def test_the_figure_is_legible():
    """Every panel has a title and units, and no texts overlap."""
    figure = _report.draw(made_up())
    figure.draw_without_rendering()
    assert len(figure.axes) == 6  # two models; times without and with XLA, memory
    assert all(axes.get_title() for axes in figure.axes)
    texts = [text for axes in figure.axes for text in (axes.title, axes.xaxis.label)]
    texts += [tick for axes in figure.axes for tick in axes.get_xticklabels()]
    texts += figure.axes[0].get_yticklabels()
    boxes = [text.get_window_extent() for text in texts if text.get_visible()]
    boxes = [box for box in boxes if box.width]
    overlaps = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert not overlaps


def end_by_signal():
    os.kill(os.getpid(), signal.SIGTERM)


def fail():
    raise KeyError("of the function's own")


def memory_of_100_megabytes():
    before = peak_memory()
    kept = np.ones(100 * 10**6 // 8)
    after = peak_memory()
    del kept
    return os.getpid(), before, after


@pytest.mark.gate
def test_a_function_runs_in_a_process_of_its_own():
    pid, before, after = in_own_process("The job", memory_of_100_megabytes)
    assert pid != os.getpid()
    assert 90e6 < after - before < 150e6
    assert before < psutil.Process().memory_info().rss  # and not what this process has used


def memory_that_was_freed(gives_back):
    """Return bytes that were freed and are still this process's."""
    if gives_back:
        give_back_freed_memory()
    size = 20 * 10**6
    freed = np.ones(size // 8)
    del freed  # the C library keeps room for the next ones of this size
    blocks, between = [], []
    for _ in range(5):
        blocks.append(np.ones(size // 8))
        between.append(np.ones(1000))
    blocks.clear()
    return held_memory()


@pytest.mark.gate
@pytest.mark.skipif(sys.platform != "linux", reason="asks the C library of Linux")
def test_freed_memory_is_given_back():
    kept, given_back = (in_own_process("The job", memory_that_was_freed, g) for g in (False, True))
    assert kept > 15e6
    assert given_back < 10e6


@pytest.mark.gate
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail, "(?s)The job ended with exit status 1.*KeyError.*of the function's own"),
        (end_by_signal, "The job was ended by SIGTERM"),
    ],
)
def test_a_process_that_ends_without_a_result_says_how(function, message, capfd):
    with pytest.raises(ProcessError, match=message):
        in_own_process("The job", function)
    assert "KeyError" not in capfd.readouterr().err
