"""The examples of the README and of the docstrings run as they stand."""

import inspect
import re
import runpy
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from helpers import dense_data

import ga_model

README = (Path(__file__).parent.parent / "README.md").read_text()


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run(tmp_path, blocks, names=None):
    path = tmp_path / "example.py"  # a file, because TensorFlow reads the source of functions
    path.write_text("\n".join(blocks))
    return runpy.run_path(str(path), init_globals=names)


def test_the_readmes_examples_run_in_their_order(tmp_path, capsys):
    # One needs devices: `test_workers.py`.
    blocks = [block for block in python_blocks(README) if "Strategy" not in block]
    assert len(blocks) == 9
    names = run(tmp_path, blocks)
    # 1,000 rows in windows of 128, once and 10 times.
    assert names["model"].optimizer.iterations == 8 + 10 * 8
    # 8 of its own, and of 32 batches an epoch in windows of 1, 4 and 8.
    assert names["net"].optimizer.iterations == 8 + 2 * (32 + 8 + 4)
    assert names["history"]["accumulation_steps"] == [1, 1, 4, 4, 8, 8]
    assert names["report"].equivalent
    assert names["optimizer"].iterations == 8
    assert names["noise"].batch_size == pytest.approx(125, abs=1)
    assert names["found"].microbatch_size == 128
    assert names["two_towers"].optimizer.iterations == 8


@pytest.mark.parametrize("name", ga_model.__all__)
def test_the_docstrings_examples_run(name, tmp_path, capsys):
    blocks = python_blocks(inspect.getdoc(getattr(ga_model, name)))
    assert blocks
    x, y = dense_data(64, outputs=1)
    names = {name: getattr(ga_model, name) for name in ga_model.__all__}
    names.update(keras=keras, tf=tf, x=x, y=y)
    names["dataset"] = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    names["model"] = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    run(tmp_path, blocks, names)


def test_every_line_of_what_keeps_working_names_tests_that_are_there():
    section = README.split("## What keeps working")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 15
    for line in lines:
        named = re.findall(r"`(\w+\.py)::(\w+)`", line)
        assert named, line
        for file, name in named:
            assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text(), name


def test_no_other_words_are_used_for_the_same_things():
    """One word for one thing: the names of the README's table, and none of the usual others."""
    files = Path(ga_model.__file__).parent.rglob("*.py")
    sources = [README, *(p.read_text() for p in files if p.name != "_names.py")]
    for text in sources:
        assert not re.search(
            r"mini-?step|virtual batch|\bmini-?batch\b|\baccum\b", text, re.IGNORECASE
        )


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_files_that_are_linked_are_there(name):
    page = Path(__file__).parent.parent / name
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert ":" in link or (page.parent / link).exists(), link


def test_the_package_says_what_it_offers():
    assert set(ga_model.__all__) == {
        "AccumulatingModel",
        "AccumulationScheduler",
        "EquivalenceReport",
        "GradientAccumulator",
        "GradientNoiseScale",
        "accumulate",
        "check_equivalence",
    }
    assert re.fullmatch(r"\d+\.\d+\.\d+", ga_model.__version__)
    for name in ga_model.__all__:
        assert getattr(ga_model, name).__doc__
