"""The examples of the page for a backend run as they stand."""

import pytest
from case import BACKEND
from helpers import ROOT, python_blocks


@pytest.mark.skipif(BACKEND == "tensorflow", reason="the guides are written for TensorFlow")
def test_the_pages_examples_run():
    page = {"torch": "pytorch"}.get(BACKEND, BACKEND)
    names = {}
    for block in python_blocks((ROOT / f"docs/howto/{page}.md").read_text()):
        exec(block, names)
    assert int(names["model"].optimizer.iterations) == 2
    assert int(names["optimizer"].iterations) == 4
    if BACKEND == "torch":
        assert names["classifier"].schedule.last_epoch == 2
