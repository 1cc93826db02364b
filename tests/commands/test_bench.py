"""`python -m ga_model bench`: that it measures what it says, and prints what it measured."""

import json
import os
import signal
import subprocess
import sys

import keras
import numpy as np
import psutil
import pytest
from keras import layers

from ga_model import AccumulatingModel
from ga_model.bench import _bench, _bench_report
from ga_model.bench._bench import (
    FLOOR,
    HAND,
    KERAS,
    RECOMPUTING,
    REFERENCE,
    SIZE,
    STEPS,
    WAYS,
    WHOLE,
)
from ga_model.bench._bench_cases import CASES
from ga_model.bench._case import Case, random_numbers
from ga_model.bench._names import TRAINED_NAMES
from ga_model.bench._trained_models import trained_cases
from ga_model.cli._cli import main
from ga_model.tools._memory import give_back_freed_memory, held_memory, peak_memory
from ga_model.tools._process import ProcessError, in_own_process

OPTIONS = ["--models", "embedding", "--microbatches", "2", "1", "--jit", "off", "--minutes", "0.01"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The command's output, what it wrote as JSON, and its plot."""
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", str(folder / "bench.json"), "--plot", str(folder / "bench.png")]
    command = [sys.executable, "-m", "ga_model", "bench", *OPTIONS, *files]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert {"memory", "time: embedding"} <= set(finished.stderr.splitlines())  # what it is at
    return finished.stdout, json.loads((folder / "bench.json").read_text()), folder / "bench.png"


@pytest.mark.gate
def test_the_table_shows_the_ratios_of_what_was_measured(run):
    printed, measured, _ = run
    lines = [line.split() for line in printed.splitlines() if line.startswith("embedding")]
    assert [line[2] for line in lines[:2]] == ["1", "2"]
    seconds = {
        (entry["way"], entry["microbatches"]): np.array(entry["seconds_per_row"])
        for entry in measured["times"]
    }
    plain = seconds[REFERENCE, 1]
    rounds = len(plain)
    assert rounds >= 3
    own = (STEPS, SIZE, RECOMPUTING)
    of_one = [seconds[FLOOR, 1], None, None, None, *(seconds[way, 1] for way in own)]
    of_two = [seconds[FLOOR, 1], *(seconds[way, 2] for way in (WHOLE, KERAS, HAND, *own))]
    for line, values in zip(lines, (of_one, of_two)):
        expected = []
        for value in values:
            if value is None:
                expected.append("-")
            else:
                low, median, high = np.quantile(value / plain, [0.25, 0.5, 0.75])
                expected += [f"{median:.2f}", f"+-{(high - low) / 2:.2f}"]
        assert line == ["embedding", "off", line[2], str(rounds), *expected]
    sizes = {entry["way"]: entry["bytes"] for entry in measured["memory"]}
    plain_size = sizes.pop(REFERENCE)
    units = {e["way"]: e["bytes_of_trainable_variables"] for e in measured["memory"]}
    units[SIZE] += next(e["bytes_of_batch"] for e in measured["memory"] if e["way"] == SIZE)
    ratios = []
    units[RECOMPUTING] = units[SIZE]
    for way in (WHOLE, KERAS, HAND, *own):
        ratios.append(f"{sizes[way] / plain_size:.2f}")
        ratios.append(f"({(sizes[way] - plain_size) / units[way]:+.2f})")
    first = [
        max(e["seconds_of_first_call"] for e in measured["times"] if e["way"] == way)
        for way in (REFERENCE, KERAS, *own)
    ]
    assert lines[3][3:] == ["s", *(f"{seconds / first[0]:.2f}" for seconds in first[1:])]
    assert lines[2] == ["embedding", "off", f"{plain_size / 1e6:,.0f}", "MB", *ratios]


@pytest.mark.gate
def test_memory_is_that_of_the_training_alone(run):
    """The table takes 25.6 MB, and Keras's accumulation a copy of it."""
    _, measured, _ = run
    size = 4 * (200_000 * 32 + 33 * 64 + 65 * 10)
    assert {entry["bytes_of_trainable_variables"] for entry in measured["memory"]} == {size}
    sizes = {entry["way"]: entry["bytes"] for entry in measured["memory"]}
    assert size <= sizes[REFERENCE] < 4 * size
    assert 0.5 * size < sizes[KERAS] - sizes[REFERENCE] < 3 * size


@pytest.mark.gate
def test_the_plot_is_written(run):
    assert run[2].read_bytes().startswith(b"\x89PNG")


def small_case():
    def make_model():
        return keras.Sequential([keras.Input((4,)), layers.Dense(10, "softmax")])

    return Case(make_model, keras.optimizers.SGD, random_numbers(4), 2)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_does_what_it_is_called(way):
    """Of four microbatches, how many calls it takes, and after which the weights change."""
    number = 4
    training = _bench.Training(small_case(), False, way, number)
    changes = []
    for _ in range(number):
        before = training.model.get_weights()
        training.run(number if way in (WHOLE, SIZE, RECOMPUTING) else 1)
        after = training.model.get_weights()
        changes.append(any(np.any(a != b) for a, b in zip(before, after)))
    always, once = [True] * number, [False] * (number - 1) + [True]
    expected = {FLOOR: [False] * number, KERAS: once, HAND: once, STEPS: once}
    assert changes == expected.get(way, always)
    batch = next(training._batches)[0]
    assert len(batch) == (number if way in (WHOLE, SIZE, RECOMPUTING) else 1) * small_case().rows
    like = _bench.Training(small_case(), False, way, 2, training)
    if way in (STEPS, SIZE, RECOMPUTING, WHOLE):
        before = int(training.model.optimizer.iterations)
        like.run(4)
        assert int(training.model.optimizer.iterations) == before + 2


def test_a_loop_by_hand_trains_as_accumulation_steps_do():
    weights = []
    for way in (HAND, STEPS):
        training = _bench.Training(small_case(), False, way, 4)
        training.run(8)
        weights.append(training.model.get_weights())
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


SMALL_MODELS = dict(zip(TRAINED_NAMES, trained_cases(1, 32, 8, 50), strict=True))


@pytest.mark.gate
@pytest.mark.parametrize("way", [STEPS, FLOOR, SIZE, RECOMPUTING])
@pytest.mark.parametrize("name", TRAINED_NAMES[::-1])
@pytest.mark.filterwarnings("ignore:A window of microbatches does not train:UserWarning")
def test_the_models_that_people_train_are_trained(name, way):
    training = _bench.Training(SMALL_MODELS[name], False, way, 2)
    before = training.model.get_weights()
    training.run(2)
    changed = [not np.array_equal(*pair) for pair in zip(before, training.model.get_weights())]
    assert any(changed) == (way != FLOOR)


def test_models_of_keras_hub_are_refused_without_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(SystemExit):
        main(["bench", "--models", "dense", "gpt2"])
    assert "keras-hub is not installed, which makes the models gpt2. " in capsys.readouterr().err


def test_times_are_those_of_a_row(monkeypatch):
    """Time is made to pass by a second per row of the batches that are trained on."""
    monkeypatch.setattr(_bench, "_warm_up", lambda jit_compile: None)
    clock = [0.0]

    def make_function(model):
        def train(iterator):
            clock[0] += len(next(iterator)[0])

        model.train_function = train

    monkeypatch.setitem(CASES, "small", small_case())
    monkeypatch.setattr(keras.Model, "make_train_function", make_function)
    monkeypatch.setattr(AccumulatingModel, "make_train_function", make_function)
    monkeypatch.setattr(
        _bench,
        "gradient_function",
        lambda model: make_function(model) or model.train_function,
    )
    monkeypatch.setattr(
        _bench, "loop_by_hand", lambda model, _: make_function(model) or model.train_function
    )
    monkeypatch.setattr(_bench.time, "perf_counter", lambda: clock[0])
    times = _bench.measure_times("small", False, [1, 3, 4], 0.0)
    assert {len(seconds) for seconds in times.seconds.values()} == {3}
    assert {value for seconds in times.seconds.values() for value in seconds} == {1.0}


def made_up():
    keys = [(REFERENCE, 1), (FLOOR, 1)]
    keys += [(way, number) for number in (1, 16) for way in _bench.ways_of(number)]
    times, memory = [], []
    for case in ("dense", "embedding"):
        for jit in (False, True):
            seconds = {key: [1.0, 2.0, 4.0, 8.0] for key in keys}
            seconds[STEPS, 16] = [0.5, 1.0, 8.0, 16.0]  # the ratios are 0.5, 0.5, 2 and 2
            times.append(_bench.Times(case, jit, seconds, dict.fromkeys(keys, 1.0)))
            for way in () if jit else (REFERENCE, *_bench.ways_of(16)):
                size = {REFERENCE: 200, SIZE: 300}.get(way, 100) * 10**6
                memory.append(_bench.Memory(case, jit, way, 16, size, 40 * 10**6, 10**7))
    return _bench.Measured([1, 16], times, memory)


def test_ratios_are_medians_over_rounds_of_the_same_round():
    measured = made_up()
    assert _bench_report.time_ratio(measured.times[0], STEPS, 16) == (1.25, 0.75)
    assert _bench_report.time_ratio(measured.times[0], WHOLE, 16) == (1.0, 0.0)
    assert _bench_report.time_ratio(measured.times[0], WHOLE, 1) is None
    table = _bench_report.tables(measured)
    assert "1.25 +-0.75" in table
    assert "200 MB" in table
    assert "1.50 (+2.00)" in table  # of the memory: 100 MB more, in units of 50 MB
    assert "0.50 (-2.50)" in table


def test_a_platform_that_tells_no_memory_gets_no_ratio():
    measured = made_up()
    measured = measured._replace(memory=[m._replace(size=None) for m in measured.memory])
    assert "n/a" in _bench_report.tables(measured)
    _bench_report.draw(measured)


def test_the_figure_is_legible():
    """Every panel has a title and units, and no texts overlap."""
    figure = _bench_report.draw(made_up())
    figure.draw_without_rendering()
    assert len(figure.axes) == 6  # two models; times without and with XLA, memory
    assert all(axes.get_title() for axes in figure.axes)
    texts = [text for axes in figure.axes for text in (axes.title, axes.xaxis.label)]
    texts += [tick for axes in figure.axes for tick in axes.get_xticklabels()]
    boxes = [text.get_window_extent() for text in [*texts, figure.legends[0]] if text.get_visible()]
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
