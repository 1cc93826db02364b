"""The notebooks run without error, and are committed as they ran.

`python tests/documents/test_notebooks.py notebooks/NAME.ipynb` runs one again and writes it.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS

pytestmark = pytest.mark.gate


def execute(notebook, folder):
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=300, record_timing=False, resources=resources).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # without the version of this Python


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def test_notebook_runs(notebook, tmp_path):
    execute(notebook, tmp_path)


def test_notebook_is_committed_executed(notebook):
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
