"""What a user meets first: names, signatures, words about settings, the command's help."""

import functools
import inspect
import pydoc
import subprocess
import sys

import keras
import pytest
from helpers import dense_data, run_python

import ga_model
from ga_model import (
    AccumulationScheduler,
    GradientAccumulator,
    GradientNoiseScale,
    accumulate,
    check_equivalence,
)
from ga_model._settings import Settings


def model(**settings):
    layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
    return accumulate(keras.Sequential(layers), **settings)


# Names.

WRONG = {
    "gradient_accumulation_steps": "accumulation_steps",
    "accum_steps": "accumulation_steps",
    "accumulate_grad_batches": "accumulation_steps",
    "acumulation_steps": "accumulation_steps",
    "micro_batch_size": "microbatch_size",
    "microbatchsize": "microbatch_size",
    "skip_nan": "skip_nonfinite",
}


@pytest.mark.every_case
@pytest.mark.parametrize(("wrong", "right"), WRONG.items())
def test_a_wrong_name_is_answered_with_the_right_one(wrong, right):
    text = rf"has no argument `{wrong}`\. Received: {wrong}=4\. Pass `{right}=4`"
    for call in (model, model().compile):
        with pytest.raises(TypeError, match=text):
            call(**{wrong: 4})
    text = rf"Received: {wrong}=4.*`apply\(optimizer\)` after every 4"
    with pytest.raises(TypeError, match=text):
        GradientAccumulator(**{wrong: 4})


def of_fit(**settings):
    trained = model(microbatch_size=4)
    trained.compile("sgd", "mse")
    trained.fit(*dense_data(8), **settings)


MISPLACED = [
    (
        lambda: accumulate(model(), 16),
        "its settings as keyword arguments.*`accumulation_steps=16` or `microbatch_size=16`",
    ),
    (lambda: GradientAccumulator(4), r"does not count.*after every 4 `add`s\."),
    (lambda: GradientAccumulator().add([], []), "'weight'"),
    (lambda: model(batch_size=128), r"`batch_size` belongs to `fit`.*batch_size=128.*at a time"),
    (lambda: model().compile(epochs=2), r"`epochs` belongs to `fit`\. Received: .*epochs=2\)\.$"),
    *(
        (functools.partial(of_fit, **{n: 4}), rf"`{n}` is a setting of the model.*fit\({n}=4\)")
        for n in ("accumulation_steps", "microbatch_size")
    ),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("call", "words"), MISPLACED, ids=[words for _, words in MISPLACED])
def test_what_is_given_in_another_place_is_answered_with_the_right_one(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_methods_show_the_arguments_of_keras():
    settings = {"accumulation_steps", "microbatch_size", "skip_nonfinite", "loss_over", "verify"}
    for name, more in {"fit": set(), "compile": settings, "train_on_batch": set()}.items():
        shown = inspect.signature(getattr(model(), name)).parameters
        of_keras = inspect.signature(getattr(keras.Model(), name)).parameters
        assert list(shown)[: len(of_keras)] == list(of_keras)
        assert set(shown) - set(of_keras) == more


# What settings do, in words.

DESCRIBED = [
    ({"microbatch_size": 16}, 128, "128 samples per batch in 8 microbatches of 16; 1 update per"),
    ({"microbatch_size": 16}, 100, "100 samples per batch in 7 microbatches of up to 16; 1 update"),
    ({"accumulation_steps": 4}, 32, "not split; 1 update per 4 batches (128 samples)"),
    ({"microbatch_size": "auto"}, 32, "in the largest microbatches that fit in memory"),
    ({}, None, "each batch, not split; 1 update per batch"),
    ({"microbatch_size": 16, "skip_nonfinite": True}, None, "; microbatches with NaN or Inf are"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("settings", "batch_size", "words"), DESCRIBED)
def test_one_line_says_what_a_model_does(settings, batch_size, words):
    assert words in model(**settings).describe_accumulation(batch_size)


# How things print, and what types are known.


def test_what_users_hold_prints_on_one_line():
    checked = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    checked.compile("sgd", "mse")
    x, y = dense_data(24)
    report = check_equivalence(checked, x[:, :4], y[:, :1], batch_size=8, accumulation_steps=3)
    assert isinstance(report, ga_model.EquivalenceReport)
    held = [report, AccumulationScheduler({0: 1}), GradientAccumulator(), GradientNoiseScale()]
    held.append(Settings(accumulation_steps=3))
    for value in held:
        assert type(value).__name__ in repr(value)
        assert "\n" not in repr(value)
        assert " object at 0x" not in repr(value)
    page = report._repr_html_()
    assert page.count("<tr>") == 1 + len(report._rows())
    assert "Equivalent: after 1 update with batch_size=8" in page


USER_SCRIPT = """
import keras
from ga_model import AccumulatingModel, EquivalenceReport, accumulate, check_equivalence

model = accumulate(keras.Sequential([keras.layers.Dense(1)]), microbatch_size=16)
reveal_type(model.microbatch_size)
reveal_type(model.accumulation_steps)
reveal_type(model.describe_accumulation(128))
report: EquivalenceReport = check_equivalence(model, [[1.0]], [[1.0]], batch_size=2)
reveal_type(report.equivalent)

class Net(AccumulatingModel, keras.Model):
    pass

reveal_type(Net().has_updated)
model.compile("adam", "mse", microbatch_size="auto")
model.compile("adam", "mse", microbatch_size=1.5)
accumulate(model, accum_steps=3)
model.no_such_thing_of_ours()
"""


@pytest.mark.gate
def test_a_type_checker_knows_the_names_and_the_types(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(USER_SCRIPT)
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent"]
    process = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    said = [line.split(": ", 1)[1] for line in process.stdout.splitlines() if ": " in line]
    revealed = [line.split("Revealed type is ")[1] for line in said if "Revealed" in line]
    assert [text.replace("builtins.", "").strip('"') for text in revealed] == [
        "int | str | None",
        "int",
        "str",
        "bool",
        "bool",
    ], process.stdout
    errors = [line for line in said if line.startswith("error")]
    assert "microbatch_size" in errors[0]
    assert "accum_steps" in errors[1]


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        ga_model.no_such_name  # noqa: B018
    assert set(ga_model.__all__) <= set(dir(ga_model))
    assert "accumulate" in pydoc.render_doc(ga_model)


# The command line, where it says how it is used.

HELP = [[], ["--help"], ["--version"], ["demo", "--help"], ["check", "--help"], ["bench", "--help"]]
HEAVY = """
import sys
sys.argv[1:] = {words!r}
try:
    from ga_model import __main__
except SystemExit as ending:
    print("status", ending.code or 0)
print("heavy", sorted({{"keras", "numpy", "tensorflow", "matplotlib"}} & set(sys.modules)))
"""


@pytest.mark.every_case
@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_imports_nothing_that_takes_long_and_prints_nothing_else(words):
    printed, errors = run_python("-c", HEAVY.format(words=words))
    assert errors == ""
    *said, status, heavy = printed.splitlines()
    assert (status, heavy) == ("status 0", "heavy []")
    assert said[0].startswith("ga_model 0" if words == ["--version"] else "usage: ga_model")
