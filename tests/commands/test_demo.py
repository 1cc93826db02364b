"""The command line's main job: `python -m ga_model`.

The first test runs the whole job, shortened to one epoch, in a process as users start it. The
others call its parts, with made-up results where a training would take long.
"""

import re
import sys
from dataclasses import replace

import keras
import numpy as np
import pytest
from helpers import run_python

from ga_model.cli._main import main
from ga_model.demo import _report, _run
from ga_model.tools._process import CommandError

SETTINGS = _run.Settings()
RUNS = _run.make_runs(SETTINGS)
SPLIT = _report.Run("full batch, split", 128, {"microbatch_size": 32})


def made_up(run, difference):
    """Return a result whose relative difference from one with `difference=0` is `difference`."""
    return _report.Result(
        run=run,
        start=[np.zeros((2, 2)), np.ones(2)],
        weights=[np.full((2, 2), 3.0 * (1 + difference)), np.full(2, 5.0)],
        updates=12,
        history={"loss": [2.0, 1.0], "val_accuracy": [0.5, 0.75]},
        seconds=1.25,
        base_memory=600 * 10**6,
        peak_memory=850 * 10**6,
    )


def made_up_results(accumulation=1e-6, control=0.5):
    differences = (0.0, 1e-6, accumulation, control)
    return [made_up(run, d) for run, d in zip(RUNS, differences, strict=True)]


def rows_of(report):
    """Return the cells of the table's lines by the name of the run."""
    cells = {}
    for run in RUNS:
        (line,) = (line for line in report.splitlines() if line.startswith(f"{run.name}  "))
        cells[run.name] = line.removeprefix(run.name).split()
    return cells


@pytest.mark.sweep
def test_the_whole_job_reproduces_the_big_batch_in_less_memory(tmp_path):
    plot = tmp_path / "demo.png"
    printed, _ = run_python("-m", "ga_model", "demo", "--epochs", 1, "--plot", plot)
    table = rows_of(printed)
    sizes = [["128", "12"], ["128", "12"], ["32", "12"], ["32", "47"]]
    assert [cells[:2] for cells in table.values()] == sizes
    big, split, accumulation, control = table.values()
    assert big[2] == split[2] == accumulation[2] != control[2]  # validation accuracy
    for cells in (split, accumulation):
        assert float(cells[3]) <= _report.TOLERANCE["float32"] < 0.1 < float(control[3])
        assert 0 < int(cells[6]) < 0.75 * int(big[6])  # memory of the training
    assert "\nReproduced: " in printed
    assert plot.read_bytes().startswith(b"\x89PNG")

    lines = printed.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        "[1/4] full batch: batches of 128",
        "[2/4] full batch, split: batches of 128, microbatch_size=32",
        "[3/4] accumulation: batches of 32, accumulation_steps=4",
        "[4/4] no accumulation: batches of 32",
    ]
    progress = [line.split()[0] for line in lines if "val_loss" in line]
    assert progress == ["12/12", "12/12", "47/47", "47/47"]
    assert len(lines) < 34
    assert not any("\r" in line or "\b" in line for line in lines)
    assert max(map(len, lines)) <= 120


def test_results_are_shown_with_their_memory():
    results = made_up_results()
    assert len(_report.draw(results).axes) == 2
    table = _report.table(results)
    assert "850 MB" in table
    assert "250 MB" in table  # of the training
    assert "1 = as large as the whole change of the weights." in table


def run_main(monkeypatch, results, *arguments):
    by_name = {r.run.name: r for r in results}
    monkeypatch.setattr(_run, "train_in_own_process", lambda run, settings: by_name[run.name])
    return main(["demo", *arguments])


def test_exit_status_tells_whether_the_big_batch_was_reproduced(monkeypatch, capsys):
    assert run_main(monkeypatch, made_up_results(accumulation=1e-6)) == 0
    assert "\nReproduced: the relative difference from the full batch is 1.0e-06 for " in (
        capsys.readouterr().out
    )
    assert run_main(monkeypatch, made_up_results(accumulation=2e-3)) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "Not reproduced: the relative difference from the full batch is 1.0e-06 for " in words
    assert "2.0e-03 for 'accumulation'," in words
    assert "for 'no accumulation' (which must differ); up to 1e-03 counts as equal" in words
    assert run_main(monkeypatch, made_up_results(accumulation=1e-6), "--dtype", "float64") == 1


def test_a_plot_that_cannot_be_written_is_exit_status_2(monkeypatch, capsys, tmp_path):
    from matplotlib.figure import Figure

    def fail(figure, path):
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    plot = str(tmp_path / "demo.png")
    assert run_main(monkeypatch, made_up_results(), "--plot", plot) == 2
    output = capsys.readouterr()
    assert f"error: The plot cannot be written to {plot!r}: No space left" in output.err
    assert "full batch" in output.out  # the report, which took a minute


def test_failed_training_is_exit_status_2(monkeypatch, capsys):
    def fail(run, settings):
        raise CommandError("The run failed.")

    monkeypatch.setattr(_run, "train_in_own_process", fail)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "ga_model demo: error: The run failed.\n"


def test_difference_is_that_of_the_worst_variable():
    reference, other = made_up(RUNS[0], 0.0), made_up(RUNS[1], 0.0)
    other.weights[0][0, 0] += 0.5  # the change was 4 times 3, so its norm is 6
    other.weights[1][1] -= 0.25  # the change was 2 times 4, so its norm is 4 * sqrt(2)
    assert _report.difference(other, reference) == pytest.approx(0.5 / 6)


def test_every_run_but_the_control_must_match():
    results = made_up_results()
    assert _report.judge([*results, made_up(SPLIT, 1e-6)], "float32")[0]
    for others, said in (
        ([*results, made_up(SPLIT, 0.1)], "Not reproduced: "),
        (made_up_results(accumulation=np.nan), "Not reproduced: "),
        ([made_up(RUNS[0], np.nan), *results[1:]], ".* not finite"),
    ):
        is_reproduced, text = _report.judge(others, "float32")
        assert not is_reproduced
        assert re.match(said, text, re.DOTALL), text


def test_settings_that_can_not_tell_the_runs_apart_prove_nothing():
    is_reproduced, text = _report.judge(made_up_results(control=1e-6), "float32")
    assert not is_reproduced
    assert text.startswith("No verdict: ")


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    assert "which is not installed. Run: pip install scikit-learn\n" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(SystemExit, match="2"):  # by argparse
        main(["demo", "--plot", "demo.png"])
    assert "which is not installed. Run: pip install matplotlib\n" in capsys.readouterr().err


def test_mnist_without_a_network_says_so(monkeypatch, capsys):
    def load_data():
        raise Exception("URL fetch failure")

    monkeypatch.setattr(keras.datasets.mnist, "load_data", load_data)
    assert main(["demo", "--dataset", "mnist"]) == 2
    assert "cannot be downloaded: URL fetch failure. Check the network" in capsys.readouterr().err


def test_mnist_goes_through_the_same_network(monkeypatch):
    images, labels = np.full((5, 28, 28), 255, "uint8"), np.zeros(5, "uint8")
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: [(images, labels)] * 2)
    data = _run.load_dataset(replace(SETTINGS, dataset="mnist"))
    (x, _), _ = data
    assert x.shape == (5, 28, 28, 1)
    assert x.max() == 1
    assert _run.make_model(28).compute_output_shape((5, 28, 28, 1)) == (5, 10)


def test_split_of_digits_depends_on_the_seed_alone():
    first, same, other = (_run.load_dataset(replace(SETTINGS, seed=s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(first[0][0], same[0][0])
    assert np.any(first[0][1] != other[0][1])
    assert [x.shape for x, _ in first] == [(1500, 8, 8, 1), (297, 8, 8, 1)]
