"""The examples of the page for PyTorch run as they stand."""

from helpers import ROOT, python_blocks
from torch_step import torch  # noqa: F401 (skips this file where Keras runs on something else)


def test_the_pages_examples_run():
    names = {}
    for block in python_blocks((ROOT / "docs/howto/pytorch.md").read_text()):
        exec(block, names)
    assert int(names["model"].optimizer.iterations) == 2
    assert int(names["optimizer"].iterations) == 4
