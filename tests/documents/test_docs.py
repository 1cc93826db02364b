"""The examples of the README, the documentation and the docstrings run as they stand."""

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from helpers import ROOT, dense_data, python_blocks, strings_in

import ga_model

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in DOCS.rglob("*.md")
    if not {"_build", "notebooks"} & set(page.parts)
)


def run(tmp_path, blocks, names=None):
    path = tmp_path / "example.py"  # a file, because TensorFlow reads the source of functions
    path.write_text("\n".join(blocks))
    return runpy.run_path(str(path), init_globals=names)


def runs_here(block):
    """Return whether a block needs neither devices nor PyTorch.

    The others are run by `test_workers.py`, `test_torch_processes.py` and `test_pages.py`.
    """
    return not re.search("Strategy|process_group|torch|jax", block)


def run_page(name, tmp_path):
    text = (ROOT / name).read_text()
    return run(tmp_path, filter(runs_here, python_blocks(text)))


def test_the_readmes_examples_run(tmp_path, capsys):
    names = run_page("README.md", tmp_path)
    assert names["model"].optimizer.iterations == 8  # 1,000 samples by 128
    assert names["report"].equivalent
    assert len(README.splitlines()) <= 150


def test_what_a_package_index_shows_has_no_link_that_leads_nowhere():
    assert "](docs/" in README
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]()
    assert not re.search(r"\]\((?!https?:)|(src|href)=.(?!https?:)", description)
    assert 'or `"auto"` to find the size | often no more time' in description
    assert "their gradients are summed" in description.lower()


# What the examples of a page come to: an expression, and its value.
RESULTS = {
    "docs/guides/batch_size.md": ("round(noise.batch_size)", 125),
    "docs/guides/contrastive_losses.md": ("int(two_towers.optimizer.iterations)", 4),
    "docs/guides/custom_loops.md": ("int(optimizer.iterations)", 8),
    "docs/guides/custom_train_steps.md": ("int(distilled.optimizer.iterations)", 4),
    "docs/guides/equivalence.md": ("report.equivalent", True),
    "docs/guides/memory.md": ("found.microbatch_size", 128),
    "docs/guides/precision.md": ("model.num_skipped_microbatches", 1),
    "docs/guides/saving.md": ("int(resumed.optimizer.iterations)", 8),
    "docs/guides/schedules.md": ("history['accumulation_steps']", [1, 1, 4, 4, 8, 8]),
    "docs/howto/batch_normalization.md": ("type(model).__name__", "Sequential"),
    "docs/howto/gan.md": ("int(gan.generator_optimizer.iterations)", 2),
    "docs/howto/language_model.md": ("report.equivalent", True),
    "docs/howto/other_memory.md": ("int(model.optimizer.iterations)", 2),
    "docs/howto/segmentation.md": ("report.equivalent", False),
    "docs/index.md": ("int(model.optimizer.iterations)", 8),
    "docs/migrating.md": ("int(model.optimizer.iterations)", 2),
    "docs/start.md": ("[int(m.optimizer.iterations) for m in (model, small, net)]", [8, 8, 8]),
}


@pytest.mark.gate
@pytest.mark.every_case
@pytest.mark.parametrize("name", RESULTS)
def test_a_pages_examples_run(name, tmp_path, capsys):
    expression, value = RESULTS[name]
    names = run_page(name, tmp_path)
    assert eval(expression, names) == value
    # A comment behind `print` says what it prints.
    said = re.findall(r"print\(.*\)  # (True|False)$", (ROOT / name).read_text(), re.MULTILINE)
    printed = re.findall(r"^(True|False)$", capsys.readouterr().out, re.MULTILINE)
    assert printed[: len(said)] == said


def test_every_page_with_examples_is_run():
    blocks = {name: python_blocks((ROOT / name).read_text()) for name in PAGES}
    assert {name for name in PAGES if any(map(runs_here, blocks[name]))} == set(RESULTS)


@pytest.mark.every_case
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
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    section = (DOCS / "reference/tested.md").read_text().split("## What keeps working")[1]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 15
    for line in lines:
        named = re.findall(r"`(\w+\.py)::(\w+)`", line)
        assert named, line
        for file, name in named:
            assert f"\ndef {name}(" in files[file], name


def test_every_limit_says_what_to_do():
    lines = (DOCS / "reference/limits.md").read_text().splitlines()
    limits = [line for line in lines if re.match(r"\| [AM]", line)]
    assert len(limits) > 25
    for line in limits:
        *_, what_to_do, _ = line.split("|")
        assert what_to_do.strip(), line


def test_every_message_that_is_explained_is_one_of_the_packages():
    lines = (DOCS / "questions.md").read_text().split("## Errors and warnings")[1].splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| `")]
    quoted = [row.strip("`") for row in rows if not row.endswith(")")]  # others' errors name them
    assert len(quoted) > 10
    said = [
        text for path in Path(ga_model.__file__).parent.rglob("*.py") for text in strings_in(path)
    ]
    for message in quoted:
        assert "`" not in message, message  # Markdown would end the code there
        assert any(message in text for text in said), message


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_files_that_are_linked_are_there(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        file = (page.parent / link).as_posix().replace("/docs/notebooks/", "/notebooks/")
        file = re.sub(r"/docs/(guides|howto|reference)/\.\./notebooks/", "/notebooks/", file)
        assert ":" in link or Path(file).exists(), link


@pytest.mark.sweep
@pytest.mark.parametrize("script", sorted((DOCS / "maintainers/reports").glob("*.py")), ids=str)
def test_the_scripts_of_reports_to_keras_print_what_stands_there(script):
    assert len(script.read_text().splitlines()) <= 20
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    page = (DOCS / "maintainers/keras_reports.md").read_text()
    section = page.split(f"reports/{script.name}")[1].split("\n## ")[0]
    (expected,) = re.findall(r"```text\n(.*?)```", section, flags=re.DOTALL)
    assert expected.strip() in result.stdout + result.stderr


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
