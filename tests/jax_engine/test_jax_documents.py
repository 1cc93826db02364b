"""The examples of the page for JAX run as they stand."""

from helpers import ROOT, python_blocks


def test_the_pages_examples_run():
    names = {}
    for block in python_blocks((ROOT / "docs/howto/jax.md").read_text()):
        exec(block, names)
    assert int(names["model"].optimizer.iterations) == 2
    assert int(names["optimizer"].iterations) == 4
