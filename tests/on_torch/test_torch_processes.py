"""On PyTorch, several processes train as one with all their samples, or it is said otherwise.

Starting processes takes seconds, so they train all cases, once in a run of pytest, and tests look
at what came out.
"""

import functools
import os
import pickle

import numpy as np
import pytest
import trainings_of_processes as trainings
from filelock import FileLock
from helpers import LIMIT, ROOT, assert_equal, python_blocks, relative_difference, run_python


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Return a function of the number of processes, which returns what each has returned."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers

    @functools.cache
    def found(size):
        file = folder / f"{size}_processes.pickle"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                function = trainings.everything if size == 2 else trainings.a_few
                try:
                    found = trainings.run_in_processes(function, size)
                except Exception as error:  # nothing is tried twice
                    found = str(error)
                file.write_bytes(pickle.dumps(found))
            return pickle.loads(file.read_bytes())

    def results(size):
        assert isinstance(found(size), list), found(size)
        return found(size)

    return results


def expected(name, size):
    if name.startswith("loop"):
        return trainings.looped_reference(size, name.split()[-1])
    return trainings.reference("both" if name == "train_on_batch" else name, size)


NAMES = [*trainings.CASES, "loop, mean", "loop, sum", "train_on_batch"]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # of "unused"
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_match_one_on_the_full_batch(name, results):
    assert_match(name, results(2))


@pytest.mark.gate
@pytest.mark.parametrize("name", ["both", "masked", "loop, mean"])
def test_three_processes_match_one_on_the_full_batch(name, results):
    assert_match(name, results(3))


def assert_match(name, results):
    reference, start, num_updates = expected(name, len(results))
    trained = [result["trained"][name] for result in results]
    for weights, num_exchanges in trained:
        assert_equal(weights, trained[0][0])
        assert relative_difference(weights, reference, start) <= LIMIT
        assert num_exchanges == num_updates


@pytest.mark.gate
def test_the_guides_example_runs(tmp_path):
    (script,) = [
        block
        for block in python_blocks((ROOT / "docs/guides/distributed.md").read_text())
        if "process_group" in block
    ]
    path = tmp_path / "several_processes.py"
    path.write_text(script)
    run = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    printed, _ = run_python(*run, path, PYTHONPATH=str(ROOT))
    assert printed.count("16 updates") == 2  # 500 samples by 4 times 16, twice


ERRORS = {
    "no choice": "ValueError: With several processes, you must say whether",
    "choice by name": "TypeError: `process_group` must be",
    "other weights": "RuntimeError: All processes of a `process_group` must start with",
    "other epochs": "RuntimeError: All processes of a `process_group` must train the same epochs",
    "stopped": "RuntimeError: All processes of a `process_group` must train the same epochs",
    "slowed": "RuntimeError: All processes of a `process_group` must start with",
    "noise of one": "RuntimeError: `GradientNoiseScale` must run in all processes",
    "regularized sum": "ValueError: With several processes, a loss that is a sum cannot",
    "no batch": "nothing",
    "a group of its own": "nothing",
    "loop without a group": "ValueError: With several processes, you must say whether",
    "loop with both": "RuntimeError: `weight` must be a number in every call of a window",
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_go_together_is_an_error_in_all_processes(name, results):
    for result in results(2):
        assert result["errors"][name].startswith(ERRORS[name]), result["errors"][name]


def test_a_group_without_a_process_is_refused_in_that_one(results):
    said = [result["errors"]["choice without it"] for result in results(2)]
    assert said[0] == "nothing"
    assert said[1].startswith("ValueError: `process_group` must be")
    assert "Received: a group without this process. " in said[1]


def test_the_noise_of_gradients_is_that_of_all_processes(results):
    expected = trainings.measured_reference(2)
    for result in results(2):
        np.testing.assert_allclose(result["noise"], expected, rtol=1e-4)


def test_gradients_are_summed_in_buckets(results):
    (together, num_updates), (alone, num_exchanges) = (
        results(2)[0]["trained"]["both"],
        results(2)[0]["small buckets"],
    )
    assert_equal(together, alone)
    assert num_exchanges == num_updates * len(alone)


@pytest.mark.parametrize("way", trainings.WAYS)
def test_sums_beside_means_are_exact_for_equal_batches_and_told(way, results):
    reference, start = trainings.told_reference(2, trainings.TOLD["with a sum"])
    for result in results(2):
        weights, messages = result["told"][f"with a sum {way}"]
        assert relative_difference(weights, reference, start) <= LIMIT
        assert any("The terms of" in message for message in messages)


@pytest.mark.parametrize("way", trainings.WAYS)
def test_averages_of_batch_normalization_are_told_to_be_of_a_process(way, results):
    for result in results(2):
        _, messages = result["told"][f"with batch normalization {way}"]
        assert any("cover only the process's own samples" in message for message in messages)
