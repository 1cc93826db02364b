"""The notebooks run without error, and are committed as they ran.

`python tests/documents/test_notebooks.py notebooks/NAME.ipynb` runs one again and writes it. What
must hold of its results is in `CHECKS` here, and not in the notebook.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from helpers import in_the_sweep
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS

pytestmark = [pytest.mark.gate, pytest.mark.every_case]
# The others take minutes each; what memory and time are, `test_bench.py` measures in the gate.
IN_THE_GATE = {"quick_start", "why_not_divide_by_the_number_of_microbatches"}
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # kernels inherit it


# What TensorFlow and tqdm write when they are imported.
START_UP = re.compile(
    r"WARNING: All log messages before absl|[IW]\d{4} |.*TqdmWarning|  from .autonotebook|$"
)

# Run behind the last cell of a notebook, with its names.
CHECKS = {
    "batch_normalization": """
plain, pooled, moved = runs.values()
assert plain["loss"] != pooled["loss"] == moved["loss"]
ratios = [np.divide(way["val_loss"], plain["val_loss"]) for way in (pooled, moved)]
assert np.abs(np.log(ratios[0])).max() < 0.15 < 0.3 < np.abs(np.log(ratios[1])).max()
assert far["averages pooled"] <= 1e-5
assert far["averages moved by each microbatch"] > 0.1
assert verdicts == {"frozen": "equivalent", "by_groups": "equivalent"}
plain, rematerialized, split, both = (megabytes for megabytes, *_ in measured.values())
assert rematerialized < 0.9 * plain
assert both < 1.05 * split < 0.75 * plain
assert max(changed) <= 1e-5
""",
    "contrastive_learning": """
full, split = memory_of.values()
assert split < full / 2.5
losses = [losses for _, _, losses in trained.values()]
assert losses[0][-1] < losses[0][0] - 0.5
np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
assert losses[2][-1] < losses[0][-1]
_, split, control = (
    max(
        np.linalg.norm(w - r) / np.linalg.norm(r - s)
        for w, r, s in zip(model.get_weights(), reference.get_weights(), start)
    )
    for model, _, _ in trained.values()
)
assert split < 1e-4 < 0.1 < control
""",
    "gan_and_custom_loop": """
assert difference["split into 32"] <= 1e-4
assert difference["control: batches of 32"] > 0.1
assert num_updates == int(full.optimizer.iterations)
assert by_samples_difference <= 1e-4
assert by_ones_difference > 1e-3
""",
    "gradient_noise_scale": """
assert 50 < noise_of[512, 8] < 512 < noise_of[512, 40]
""",
    "keras_hub_language_model": """
assert split_memory < 0.75 * full_memory
assert split_updates == full_updates == 2
assert split_difference <= 1e-4
assert control_difference > 0.1
assert int(model.optimizer.iterations) == num_updates
assert bits[-1] < 4.5 < bits[0]
""",
    "memory_and_time": """
by_size = dict(zip(SIZES, memory))
assert by_size[8] < plain_memory / 2
assert by_size[128] < 1.2 * plain_memory
assert by_size[8] < by_size[32] < by_size[128]
""",
    "quick_start": """
assert difference["microbatch_size=32"] <= 1e-4
assert difference["accumulation_steps=8"] <= 1e-4
assert difference["control: batches of 32"] > 0.1
for each in trained.values():
    assert int(each.optimizer.iterations) == EPOCHS * UPDATES_PER_EPOCH
    assert float(each.optimizer.learning_rate) == float(model.optimizer.learning_rate)
assert int(control.optimizer.iterations) == EPOCHS * 57
assert abs(float(control.optimizer.learning_rate)) < 1e-6
assert found.microbatch_size == BATCH_SIZE
assert "ga_model" not in config
assert type(loaded) is keras.Sequential
np.testing.assert_array_equal(loaded.predict(x[:8], verbose=0), split.predict(x[:8], verbose=0))
assert report.equivalent
assert not normalized_report.equivalent
""",
    "why_not_divide_by_the_number_of_microbatches": """
assert all(result["ga_model"] <= 1e-9 for result in results.values())
wrong = {way: {n for n, r in results.items() if r[way] > 1e-3} for way in WAYS}
assert wrong["Keras, built in"] == set(results) - {"even windows"}
assert wrong["usual recipe"] == {"partial window", "masks", "sum"}
assert max(results["even windows"].values()) <= 1e-9
assert max(results[name]["usual recipe"] for name in ("moving average", "schedule")) <= 1e-9
assert updates["ga_model"] == updates["full batch"] == EPOCHS * 4
assert updates["Keras, built in"] == EPOCHS * 14 // 4  # 14 batches an epoch
assert updates["usual recipe"] == EPOCHS * 3
assert rates["ga_model"] == rates["usual recipe"]
assert rates["ga_model"] == [rate for rate in rates["full batch"] for _ in range(FULL // SMALL)]
assert max(rates["Keras, built in"][num_updates:]) == 0
""",
}


def execute(notebook, folder):
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=300, record_timing=False, resources=resources).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # without the version of this Python
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_start_up(output)]


def is_start_up(output):
    if output.get("name") != "stderr":
        return False
    return all(START_UP.match(line) for line in output.text.splitlines())


def test_every_notebook_has_its_checks():
    assert CHECKS.keys() == {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize(
    "name", [name if name in IN_THE_GATE else in_the_sweep(name) for name in CHECKS]
)
def test_notebook_runs_and_its_results_hold(name, tmp_path):
    notebook = nbformat.read(NOTEBOOKS[0].parent / f"{name}.ipynb", as_version=4)
    notebook.cells.append(new_code_cell(CHECKS[name]))
    execute(notebook, tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_executed(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, folder)
        nbformat.write(notebook, path)
