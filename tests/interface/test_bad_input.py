"""Wrong uses: each is refused with a message that helps, and leaves nothing half changed.

`CASES` is the table. Of every row the test holds that

* the error is of the type and has the words that stand there;
* the message says what is expected, what was received and what to do, in this order, unless it is
  not ours: Keras's own errors are clear where they are listed, and must come through as they are;
* settings, weights, the optimizer's state and metrics are what they were;
* a model then trains, by the way out that the message names, exactly as one that was never misused.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import dense_data, dense_model, seeded, told

from ga_model import (
    AccumulatingModel,
    AccumulationScheduler,
    GradientAccumulator,
    GradientNoiseScale,
    accumulate,
    check_equivalence,
)
from ga_model.cli._cli import main

layers, optimizers = keras.layers, keras.optimizers
load_model = keras.saving.load_model
X, Y = dense_data(12)

ADVICE = (
    "Pass|Call|Set|Remove|Make|Let|Add|Keep|Define|Write|Return|Give|Count|Create|Rename|Put|After|"
    "Leave|From a dataset|Pass values|Freeze|Override|Draw|Turn|Use|Move|Omit"
)
HOUSE = re.compile(rf"\w[^\n]+\. Received: [\s\S]+[.)] ({ADVICE})\b[^\n]+[.`)]")


class Case(NamedTuple):
    """One wrong use.

    Attributes:
        name: what is wrong.
        subject: what it is done to: a function that returns a context manager. That gives the
            argument of `call`, and afterwards checks that nothing is half changed.
        call: does it.
        error: the type of the error.
        words: regular expression of what the message says.
        fix: what the user then does to the subject.
        whose: "ours", or who words the message.
    """

    name: str
    subject: Any
    call: Callable[[Any], Any]
    error: type[BaseException]
    words: str
    fix: Callable[[Any], Any] = lambda subject: None
    whose: str = "ours"


# What is misused.


class Net(AccumulatingModel, keras.Sequential):
    """The mixin on a model class."""


class TakesNoCallbacks(keras.Sequential):
    def fit(self, x, y, batch_size, shuffle, verbose):
        return super().fit(x, y, batch_size=batch_size, shuffle=shuffle, verbose=verbose)


class BadRule(Net):
    def microbatch_weight(self, x, y=None, sample_weight=None):
        return "mean"


def net(optimizer="adam", *, kind=Net, loss="mse", **settings):
    model = accumulate(seeded(lambda: kind([keras.Input((4,)), *dense_model().layers])))
    made = optimizer() if callable(optimizer) else optimizer
    model.compile(made, loss, metrics=["mae"], **settings)
    return model


def plain():
    model = seeded(dense_model)
    model.compile("adam", "mse", metrics=["mae"])
    return model


def not_compiled():
    return accumulate(seeded(dense_model), accumulation_steps=2)


def of_two():
    return optimizers.SGD(0.1, gradient_accumulation_steps=2)


def scaling(optimizer="sgd"):
    return optimizers.LossScaleOptimizer(optimizers.get(optimizer))


accumulating = functools.partial(net, accumulation_steps=2)
eager = functools.partial(accumulating, run_eagerly=True)
summed = functools.partial(accumulating, loss=keras.losses.MeanSquaredError(reduction="sum"))
split = functools.partial(net, microbatch_size=3)
automatic = functools.partial(net, microbatch_size="auto")
skipping = functools.partial(net, skip_nonfinite=True)


def fit(model, x=X, y=Y, **kwargs):
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, **kwargs)


class Misused:
    """A model that wrong calls are made on, and what its weights are after a right `fit`."""

    def __init__(self, model, expected):
        self.model, self.expected = model, expected
        self._optimizer = getattr(model, "optimizer", None)
        if self._optimizer:
            self._optimizer.build(model.trainable_variables)
        self._start = [v.numpy() for v in self._variables()]

    def _variables(self):
        return [*self.model.variables, *(self._optimizer.variables if self._optimizer else [])]

    def restart(self):
        for variable, value in zip(self._variables(), self._start, strict=True):
            variable.assign(value)
        self.model.reset_metrics()

    def state(self):
        """Return what a refused call must not change."""
        names = [*BAD_IN_FILES, "compiled", "has_updated"]
        counted = [v for v in self.model.metrics_variables if np.any(v.numpy())]
        values = [(v.path, v.numpy().tolist()) for v in [*self._variables(), *counted]]
        return type(self.model), [getattr(self.model, name, None) for name in names], values

    def assert_trains(self):
        fit(self.model)
        for w, e in zip(self.model.get_weights(), self.expected, strict=True):
            np.testing.assert_array_equal(w, e)


@functools.cache
def weights_after_fit(make):
    model = make()
    fit(model)
    return model.get_weights()


@functools.cache
def shared(make):
    """Return a model that is misused in several cases and traced once."""
    return Misused(make(), weights_after_fit(make))


def on(make, twin=None):
    """Return a subject: the model that `make` returns, the same one in all of its cases.

    Args:
        make: function that returns a model.
        twin: function that returns one that trains as this one when it is fixed, if it cannot
            before. Each case then has a model of its own.
    """

    @contextlib.contextmanager
    def subject(case, tmp_path):
        misused = Misused(make(), weights_after_fit(twin)) if twin else shared(make)
        misused.restart()
        before = misused.state()
        yield misused.model
        assert misused.state() == before
        case.fix(misused.model)
        misused.assert_trains()

    return subject


@contextlib.contextmanager
def nothing(case, tmp_path):
    yield None


@contextlib.contextmanager
def accumulator(case, tmp_path):
    """A new `GradientAccumulator`, and two variables."""
    misused, variables = GradientAccumulator(), [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
    yield misused, variables
    assert misused.num_microbatches == 0
    assert not misused.variables
    misused.add([TWO, ONE], variables, weight=2)
    misused.apply(optimizers.SGD(0.5))
    assert [v.numpy().tolist() for v in variables] == [[0.5, 1.5], [2.5]]


@contextlib.contextmanager
def open_window(case, tmp_path):
    """A `GradientAccumulator` that has a microbatch already, whose second gradient was None."""
    misused, variables = GradientAccumulator(), [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
    misused.add([TWO, None], variables, weight=1.0)
    yield misused, variables
    assert misused.num_microbatches == 1
    misused.add([3 * TWO, None], variables, weight=1.0)
    gradient, nothing = misused.mean()
    assert (gradient.numpy().tolist(), nothing) == ([2.0, 2.0], None)


SCRIPT = """
import keras
import numpy as np

def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, np.ones((8, 4)), np.ones((8, 1))

def of_other_rows():
    model, x, y = make()
    return model, x, y[:3]

def of_float32():
    keras.config.set_dtype_policy("float32")
    return make()

def not_compiled():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), np.ones((8, 4))

def only_a_model():
    return make()[0]

def no_model():
    return "model", 1

def leaves():
    raise SystemExit(0)

def fails():
    raise KeyError("of the script's own")

NUMBER = 3
"""


class CommandError(Exception):
    """What the command line prints where it ends with status 2."""


@contextlib.contextmanager
def command(case, tmp_path):
    """The command line, in a folder with a script, a file that is none, and a folder."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "json.py").write_text(SCRIPT)
    (tmp_path / "folder.py").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "path", sys.path.copy())
        patch.setattr(sys, "modules", sys.modules.copy())
        yield run_command
        left = {p.name for p in tmp_path.iterdir()} - {"__pycache__"}
        assert left == {"mine.py", "json.py", "folder.py"}


def run_command(line):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(line.split())
        except SystemExit as ending:
            status = ending.code
    assert not out.getvalue()
    if status == 2:
        raise CommandError(err.getvalue())


def check(target="mine.py:make", batch="4", more=""):
    """Return a line of the command `check`, right but for what is given."""
    return f"check {target} --batch-size {batch} --microbatch-size 2 {more}"


BAD_IN_FILES = {
    "accumulation_steps": 0,
    "microbatch_size": "4",
    "skip_nonfinite": 1,
    "loss_over": "all",
}


@contextlib.contextmanager
def files(case, tmp_path):
    """A folder with files that are no models, or bring code or bad settings."""
    (tmp_path / "folder.keras").mkdir()
    (tmp_path / "text.keras").write_text("model")
    accumulating().save(tmp_path / "right.keras")
    right = (tmp_path / "right.keras").read_bytes()
    (tmp_path / "truncated.keras").write_bytes(right[: len(right) // 2])
    for name, value in BAD_IN_FILES.items():
        with (
            zipfile.ZipFile(tmp_path / "right.keras") as source,
            zipfile.ZipFile(tmp_path / f"{name}.keras", "w") as target,
        ):
            for part in source.namelist():
                content = source.read(part)
                if part == "config.json":
                    config = json.loads(content)
                    config["compile_config"][name] = value
                    content = json.dumps(config).encode()
                target.writestr(part, content)
    code = lambda *values: (__import__("os").environ.update(GA_MODEL_TEST="1"), values[0])[1]  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of what the cases are about
        if "code" in case.name:
            is_layer = "layer" in case.name
            layer = layers.Lambda(code) if is_layer else layers.Dense(2)
            model = Net([keras.Input((4,)), layer])
            model.compile("sgd", "mse" if is_layer else code)
            model.save(tmp_path / "code.keras")
    os.environ.pop("GA_MODEL_TEST", None)
    yield tmp_path
    assert "GA_MODEL_TEST" not in os.environ


def loads(name):
    return lambda folder: load_model(folder / f"{name}.keras", custom_objects={"Net": Net})


# What is done.


def adds(gradients=None, variables=None, **kwargs):
    """Return a call of `add`, on right gradients and variables but for those that are given."""

    def call(subject):
        accumulator, right = subject
        wrong = [TWO, ONE] if gradients is None else gradients
        given = {"weight": 1.0, **kwargs}
        accumulator.add(wrong, right if variables is None else variables, **given)

    return call


def weighs(weight):
    return adds(weight=weight)


def fits(*data, **kwargs):
    return lambda model: fit(model, *data, **kwargs)


def trains_on(*data):
    return lambda model: model.train_on_batch(*data)


def fits_dataset(make):
    return lambda model: model.fit(make(), shuffle=False, verbose=0)


def schedules(schedule, **kwargs):
    return lambda _: AccumulationScheduler(schedule, **kwargs)


def fits_by(schedule):
    return lambda model: fit(model, callbacks=[AccumulationScheduler(schedule)])


def measures(*args, **kwargs):
    return lambda _: GradientNoiseScale(*args, **kwargs)


def fits_measured(callbacks=1):
    return lambda model: fit(model, callbacks=[GradientNoiseScale() for _ in range(callbacks)])


def reads_one_of_two(_):
    noise = GradientNoiseScale()
    noise._noise_scales = {"generator_optimizer": 1, "discriminator_optimizer": 2}
    return noise.noise_scale


def equals(*data, model=None, **kwargs):
    """Return a call of `check_equivalence`, right but for what is given."""
    given = {"batch_size": 4, "microbatch_size": 2, **kwargs}
    return lambda subject: check_equivalence(model or subject, *(data or (X, Y)), **given)


def compiles(*args, **kwargs):
    return lambda model: model.compile(*args, **kwargs)


def compiles_and_fits(optimizer):
    return lambda model: (model.compile(optimizer, "mse", metrics=["mae"]), fit(model))


def sets(name, value):
    return lambda model: setattr(model, name, value)


def has(name, value):
    """Return a call that sets an attribute of a model, and fits it."""
    return lambda model: (setattr(model, name, value), fit(model))


def again(model):
    model.compile("adam", "mse", metrics=["mae"])


def makes(*bases, **attributes):
    return lambda _: type("Wrong", bases, attributes)()


def accumulates(value):
    return lambda _: accumulate(value, accumulation_steps=2)


def accumulates_by(**settings):
    return lambda model: accumulate(model, **settings)


def applies(optimizer):
    return lambda subject: subject[0].apply(optimizer)


def batches_of(rows):
    """Return a dataset whose batches have two rows more in x than in y."""
    signature = (tf.TensorSpec((rows, 4)), tf.TensorSpec((None, 2)))
    return tf.data.Dataset.from_generator(lambda: [(X, Y[:10])], output_signature=signature)


def scalars():
    return tf.data.Dataset.from_tensors((1.0, 2.0))


def freezes_inside_of_a_window(model):
    model.train_on_batch(X[:4], Y[:4])
    model.layers[0].trainable = False
    try:
        model.train_on_batch(X[4:8], Y[4:8])
    finally:
        model.layers[0].trainable = True
        model.reset_metrics()  # an eager step counts a batch's loss before it applies anything


def compiles_in_half_precision(_):
    keras.config.set_dtype_policy("mixed_float16")
    net(skip_nonfinite=True)


# The table.

INTEGERS = [
    *((value, ValueError) for value in (0, -3, 10**30)),
    *((value, TypeError) for value in (2.0, True, "4", [4], np.array([4]), tf.constant(3.0))),
]
NO_AUTO = [(value, TypeError) for value in ("Auto", "automatic", b"auto", np.array("auto"))]
BAD = {  # values of settings, and what they must be
    "accumulation_steps": ("an integer >= 1", INTEGERS),
    "microbatch_size": ("an integer >= 1", [*INTEGERS, *NO_AUTO]),
    "skip_nonfinite": (
        "a bool",
        [(value, TypeError) for value in (1, 0.0, "yes", np.True_, tf.constant(True))],
    ),
    "loss_over": (
        r"one of \['auto', 'microbatch', 'batch'\]",
        [(value, ValueError) for value in ("Batch", "", 1, True, ["batch"])],
    ),
}


def settings_cases():
    """Yield a case for each bad value of each setting, in every way to set it."""
    ways = {
        "accumulate": (plain, lambda name, value: accumulates_by(**{name: value})),
        "compile": (split, lambda name, value: compiles("sgd", "mae", **{name: value})),
        "attribute": (accumulating, sets),
    }
    for setting, (kind, values) in BAD.items():
        for (value, error), (way, (make, call)) in itertools.product(values, ways.items()):
            words = rf"`{setting}` must be {kind}\. Received: {setting}={re.escape(repr(value))}"
            yield Case(
                f"{setting}={value!r} by {way}", on(make), call(setting, value), error, words
            )


def cases(subject, *rows, **more):
    """Return a case for each row: name, call, error, words, and maybe the way out."""
    return [Case(name, subject, *rest, **more) for name, *rest in rows]


def commands(*rows, whose="ours"):
    """Return a case for each row: the line behind `python -m ga_model`, and words."""
    return [
        Case(r[0], command, lambda run, r=r: run(r[0]), CommandError, r[1], whose=whose)
        for r in rows
    ]


def each(name, call, error, words, *values):
    """Return a row for each value, which the message repeats behind the words."""
    return [
        (f"{name} {value!r}", call(value), error, words + re.escape(repr(value)[:10]))
        for value in values
    ]


V = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
ONE, TWO, THREE = tf.ones(1), tf.ones(2), tf.ones(3)
SIDE = "must come before the Keras model class.* Received: class Wrong"
NO_KERAS_MODEL = r"Received: class Wrong, which is not a subclass of `keras\.Model`"
NO_MODEL = "takes a Keras model. Received: model="
TWICE = "accumulated twice. Received: {} and the optimizer '.*' with gradient_accumulation_steps=2"
BY_2, BY_CLASS = TWICE.format("accumulation_steps=2"), TWICE.format("a `GradientAccumulator`")
SCALING = "Received: skip_nonfinite=True with a LossScaleOptimizer"
ROWS = "`microbatch_size` splits each batch along axis 0.* Received: "
SHAPES = ROWS + r"shapes \[\(12, 4\), "
DECAY = "`decay` must be a number >= 0 and < 1. Received: decay="
UNKNOWN_SIZE = "a fixed number of samples per microbatch. Received: .* before a size was found"
SCHEDULE = "`schedule` must be a dict or a function. Received: schedule="
WEIGHT = "`weight` must be a scalar number or tensor, or None .* Received: weight="
PER_VARIABLE = "one gradient for each variable. Received: "
NO_VARIABLES = "must be variables of TensorFlow or Keras. Received: 2 values of type "
OF_SHAPE = "must have the shape of its variable. Received: shape "
OTHER_VARIABLES = r"to the same variables, in the same order. Received: different variables\."
SAME_OPTIMIZERS = "must apply the same optimizers, .* Received: `train_step` of 'net'"
NO_OPTIMIZER = "takes a Keras optimizer. Received: optimizer="
INTEGER = "must be an integer >= 1. Received: "
TWO_MICROBATCHES = "must have at least two microbatches.* Received: "
NO_ARRAYS = "with samples on axis 0. Received: x, y, sample_weight of types "
TARGET = "must be passed as FILE.py:function. Received: "
UNSAFE = "(?s)arbitrary code execution.*`safe_mode=False`"
KERAS, ARGPARSE, SCRIPTS = "Keras's own", "argparse's own", "the script's own"
OWN_STEP = "must be a method of the model's class. Received: .* assigned to the instance"
ON_THE_CLASS = "a setting of each model.* Received: class Wrong with accumulation_steps=4"
NO_CALLBACKS = r"Received: .* that does not\. Let it take `\*\*kwargs`"
NO_NUMBER = "`microbatch_weight` must return a number.* Received: 'mean'"
BY_OTHERS = "in a compiled function. Received: a call of `train_step` of 'net' by other code"
ONE_OPTIMIZER = "needs a single optimizer.* Received: 2 optimizers"
NO_SCHEDULES = "needs a model that accumulates gradients. Received: .*Call `accumulate"
CONFIG = {"class_name": "SGD", "config": {"gradient_accumulation_steps": 2}}
TRACED = "Received: a call that was traced before any gradient was added"
PLAIN = sets("accumulation_steps", 1)

CASES = [
    *settings_cases(),
    # Models.
    *cases(
        nothing,
        ("the mixin behind Model", makes(keras.Model, AccumulatingModel), TypeError, SIDE),
        ("behind Sequential", makes(keras.Sequential, AccumulatingModel), TypeError, SIDE),
        ("on a layer", makes(AccumulatingModel, layers.Layer), TypeError, NO_KERAS_MODEL),
        ("on nothing", makes(AccumulatingModel), TypeError, NO_KERAS_MODEL),
        ("on the class", makes(Net, accumulation_steps=4), TypeError, ON_THE_CLASS),
        ("a path", accumulates("a.keras"), TypeError, "'a.keras'.* Turn it into a `keras.Model`"),
        ("a class", accumulates(Net), TypeError, NO_MODEL + ".* Call the class"),
        *each("accumulate", accumulates, TypeError, NO_MODEL, None, "a.keras"),
        *each("accumulate", accumulates, TypeError, NO_MODEL, layers.Dense(1), of_two()),
    ),
    *cases(
        on(accumulating, accumulating),
        (
            "train_step on the instance",
            has("train_step", lambda data: {}),
            TypeError,
            OWN_STEP,
            lambda model: delattr(model, "train_step"),
        ),
    ),
    *cases(
        on(functools.partial(accumulating, kind=TakesNoCallbacks), plain),
        ("a fit that takes no callbacks", fits(), TypeError, NO_CALLBACKS, PLAIN),
    ),
    *cases(
        on(functools.partial(accumulating, kind=BadRule), plain),
        ("a weight that is no number", fits(), ValueError, NO_NUMBER, PLAIN),
    ),
    # Optimizers.
    *cases(
        on(functools.partial(net, of_two)),
        ("two accumulate, by attribute", sets("accumulation_steps", 2), ValueError, BY_2),
        ("by accumulate", accumulates_by(accumulation_steps=2), ValueError, BY_2),
        ("by a schedule", fits_by({0: 1, 3: 2}), ValueError, BY_2),
        ("by a function", fits_by(lambda epoch: 2), ValueError, BY_2),
        ("in a check", equals(accumulation_steps=2), ValueError, BY_2),
    ),
    *cases(
        on(accumulating),
        ("by compile", compiles(of_two(), "mse"), ValueError, BY_2),
        ("inside of another", compiles(scaling(of_two()), "mse"), ValueError, BY_2),
        ("an unknown setting", compiles("sgd", accum_steps=2), TypeError, "accum_steps=2. Pass `a"),
    ),
    *cases(
        on(accumulating, accumulating),
        ("by another optimizer", has("optimizer", of_two()), ValueError, BY_2, again),
        ("by a configuration", compiles_and_fits(CONFIG), ValueError, BY_2, again),
    ),
    *cases(
        on(functools.partial(accumulating, None), accumulating),
        ("no optimizer", fits(), RuntimeError, "needs an optimizer. .*optimizer=None", again),
    ),
    *cases(
        on(functools.partial(net, scaling)),
        ("skips and scales, by attribute", sets("skip_nonfinite", True), ValueError, SCALING),
        ("by accumulate", accumulates_by(skip_nonfinite=True), ValueError, SCALING),
    ),
    *cases(on(skipping), ("by compile", compiles(scaling(), "mse"), ValueError, SCALING)),
    *cases(
        on(skipping, skipping),
        ("by another optimizer", has("optimizer", scaling()), ValueError, SCALING, again),
    ),
    *cases(nothing, ("by the policy", compiles_in_half_precision, ValueError, SCALING)),
    *cases(
        on(accumulating),
        ("an unknown optimizer", compiles("nope", "mse"), ValueError, "optimizer.*nope"),
        whose=KERAS,
    ),
    # Data.
    *cases(
        on(split, split),
        ("rows of y", trains_on(X, Y[:10]), ValueError, SHAPES + r"\(10, 2"),
        ("of nested inputs", trains_on({"a": X, "b": X[:7]}, Y), ValueError, SHAPES + r"\(7, 4"),
        ("of sample weights", trains_on(X, Y, np.ones(5)), ValueError, SHAPES + r".*, \(5,\)\]"),
        (
            "of unknown number",
            fits_dataset(lambda: batches_of(None)),
            ValueError,
            SHAPES + r"\(10, 2",
        ),
        ("of one of them", fits_dataset(lambda: batches_of(12)), ValueError, SHAPES + r"\(10, 2"),
        ("scalars only", fits_dataset(scalars), ValueError, ROWS + r"shapes \[\]"),
    ),
    *itertools.chain.from_iterable(
        cases(
            on(make),
            ("rows of arrays", fits(X, Y[:10]), ValueError, "(?s)x.*12.*y.*10"),
            ("text", fits(np.full((12, 4), "a")), ValueError, "dtype"),
            ("ragged rows", fits([[1.0]] * 11 + [[]]), ValueError, "data type"),
            whose=KERAS,
        )
        for make in (accumulating, split)
    ),
    *cases(
        on(accumulating, accumulating),
        ("columns", fits(X[:, :3]), ValueError, "value 4, but received", again),
        whose=KERAS,
    ),
    # The order of calls.
    *cases(
        on(automatic, automatic),
        ("a step of others", lambda m: tf.function(m.train_step)((X, Y)), RuntimeError, BY_OTHERS),
    ),
    *cases(
        on(not_compiled, accumulating),
        ("fit before compile", fits(), ValueError, r"must call `compile\(\)`", again),
        ("a batch before compile", trains_on(X, Y), ValueError, r"call `compile\(\)`", again),
        whose=KERAS,
    ),
    *cases(
        on(eager, eager),
        ("layers frozen in a window", freezes_inside_of_a_window, RuntimeError, SAME_OPTIMIZERS),
    ),
    # `GradientAccumulator`.
    *cases(
        open_window,
        ("other variables", adds([TWO, None], V), ValueError, OTHER_VARIABLES),
        ("fewer", lambda s: s[0].add([TWO], s[1][:1], weight=1.0), ValueError, OTHER_VARIABLES),
        ("a sum after a mean", adds([TWO, None], weight=None), ValueError, "Received: both"),
        ("a late gradient", adds([TWO, ONE]), RuntimeError, "Received: a gradient for .'Variable"),
        ("an optimizer that accumulates", applies(of_two()), ValueError, BY_CLASS),
        ("one inside of another", applies(scaling(of_two())), ValueError, BY_CLASS),
        ("a class", applies(optimizers.SGD), TypeError, NO_OPTIMIZER + ".* Call the class first"),
        *each("apply", applies, TypeError, NO_OPTIMIZER, None, "adam"),
    ),
    *cases(
        accumulator,
        (
            "apply traced before add",
            lambda s: tf.function(lambda: s[0].apply(optimizers.SGD()))(),
            RuntimeError,
            TRACED,
        ),
        *each("a weight of", weighs, ValueError, WEIGHT, "3", [1.0], TWO, 1j, {"rows": 3}),
        ("fewer gradients", adds([TWO]), ValueError, PER_VARIABLE + "1 gradients and 2 variables"),
        ("None", lambda s: s[0].add(None, s[1], weight=1), TypeError, PER_VARIABLE + "'NoneType'"),
        ("one variable", adds([TWO], V[0]), TypeError, PER_VARIABLE + "'list' and 'Resource"),
        ("a generator", adds(g for g in [TWO, ONE]), TypeError, PER_VARIABLE + "'generator'"),
        ("a dict of gradients", adds({0: TWO, 1: ONE}), TypeError, PER_VARIABLE + "'dict'"),
        ("swapped arguments", adds(V, [TWO, ONE]), TypeError, NO_VARIABLES + "EagerTensor"),
        ("no variables", adds(variables=[None, None]), TypeError, NO_VARIABLES + "NoneType"),
    ),
    *cases(
        accumulator,
        ("a shape", adds([THREE, ONE]), ValueError, OF_SHAPE + r"\(3,\) for .* \(2,\)"),
        ("one that broadcasts", adds([ONE, ONE]), ValueError, OF_SHAPE + r"\(1,\) for .* \(2,\)"),
    ),
    *cases(
        accumulator,
        *each("a weight of", weighs, ValueError, WEIGHT, b"3", np.array("3")),
    ),
    # The gradient noise scale.
    *cases(
        nothing,
        *each("a decay of", measures, ValueError, DECAY, 1, -0.5, float("nan")),
        *each("a decay of", measures, TypeError, DECAY, "0.9", True, None, [0.9]),
        ("a unit that is a number", measures(unit=8), TypeError, "a string. Received: unit=8"),
        ("verbose of 1", measures(verbose=1), TypeError, "bool. Received: verbose=1"),
        ("one noise scale of two", reads_one_of_two, ValueError, ONE_OPTIMIZER),
    ),
    *cases(on(plain), ("a plain model's noise", fits_measured(), TypeError, ".*, which does not")),
    *cases(on(skipping), ("of one microbatch", fits_measured(), ValueError, ".*microbatch_size=N")),
    *cases(on(summed), ("noise of a sum", fits_measured(), ValueError, "whose loss is a sum")),
    # Schedules.
    *cases(
        nothing,
        *each("a schedule", schedules, TypeError, SCHEDULE, 4, [1, 2], None),
        ("nothing in it", schedules({}), ValueError, "Received: schedule={}, without the key 0"),
        ("no beginning", schedules({3: 4}), ValueError, "without the key 0. Add `0: 1`"),
        ("zero steps", schedules({0: 0}), ValueError, r"`schedule\[0\]` " + INTEGER + r".*=0"),
        ("half a step", schedules({0: 0.5}), TypeError, r"`schedule\[0\]` " + INTEGER + r".*=0\.5"),
        ("an epoch below 0", schedules({0: 1, -1: 2}), ValueError, "integer >= 0. .*schedule=-1"),
        ("half an epoch", schedules({0: 1, 2.5: 2}), TypeError, r"integer >= 0. .*schedule=2\.5"),
        ("by batches", schedules({0: 1}, by="batch"), ValueError, "one of .* Received: by='batch'"),
        ("by an array", schedules({0: 1}, by=X), ValueError, "`by` must be one of .*: by=array"),
        ("a log of text", schedules({0: 1}, log="yes"), TypeError, "bool. Received: log='yes'"),
    ),
    *cases(
        on(accumulating),
        ("of halves", fits_by(lambda i: 2.5), TypeError, r"Received: schedule\(0\)=2\.5"),
        ("of nothing", fits_by(lambda i: None), TypeError, r"Received: schedule\(0\)=None"),
        ("of zeros", fits_by(lambda i: 0), ValueError, r"Received: schedule\(0\)=0"),
        ("noise twice", fits_measured(2), RuntimeError, "a second one for"),
    ),
    *cases(
        on(plain),
        ("a schedule for a plain model", fits_by({0: 2}), TypeError, NO_SCHEDULES),
        # `check_equivalence`.
        ("over nothing", equals(loss_over="rows"), ValueError, "`loss_over` must be one of"),
        ("one microbatch", equals(microbatch_size=4), ValueError, TWO_MICROBATCHES + "12 samples"),
        ("a check of a size to find", equals(microbatch_size="auto"), ValueError, UNKNOWN_SIZE),
        ("no rows", equals(X[:0], Y[:0]), ValueError, TWO_MICROBATCHES + "0 samples"),
        ("batches of 0", equals(batch_size=0), ValueError, INTEGER + "batch_size=0"),
        ("no batches", equals(batch_size=None), TypeError, INTEGER + "batch_size=None"),
        ("half an update", equals(updates=2.5), TypeError, INTEGER + r"updates=2\.5"),
        ("other rows", equals(X, Y[:4]), ValueError, r"same number .* shapes \[\(12, 4\), \(4, 2"),
        ("a dataset", equals(tf.data.Dataset.range(3)), TypeError, NO_ARRAYS + "_RangeDataset"),
        ("a generator of rows", equals((r for r in X), Y), TypeError, NO_ARRAYS + "generator"),
        ("lists", equals(X.tolist(), Y.tolist()), TypeError, NO_ARRAYS + "list, list"),
        ("no targets", equals(X), ValueError, "needs targets. Received: y=None for"),
    ),
    *cases(
        on(plain),
        ("columns in a check", equals(X[:, :3], Y), ValueError, "value 4, but received"),
        whose=KERAS,
    ),
    *cases(
        nothing,
        ("a path", equals(model="a.keras"), TypeError, NO_MODEL + "'a.keras'"),
        ("a class", equals(model=Net), TypeError, NO_MODEL + ".* Call the class first"),
        (
            "what is not compiled",
            lambda _: equals(model=dense_model())(_),
            RuntimeError,
            "needs a compiled model. Received: .* is not compiled",
        ),
    ),
    # Files.
    *cases(
        files,
        ("steps in a file", loads("accumulation_steps"), ValueError, INTEGER + "accumul.*=0"),
        ("size in a file", loads("microbatch_size"), TypeError, INTEGER + "microb.*='4'"),
        ("skip in a file", loads("skip_nonfinite"), TypeError, "bool. Received: skip_.*=1"),
        ("loss in a file", loads("loss_over"), ValueError, "one of .*loss_over='all'"),
    ),
    *cases(
        files,
        ("no file", loads("nowhere"), ValueError, r"nowhere\.keras"),
        ("a folder", loads("folder"), ValueError, r"folder\.keras"),
        ("text", loads("text"), ValueError, r"text\.keras"),
        ("half a file", loads("truncated"), ValueError, r"truncated\.keras"),
        ("code in a layer", loads("code"), ValueError, UNSAFE),
        ("code in the loss", loads("code"), ValueError, UNSAFE),
        whose=KERAS,
    ),
    # The command line.
    *commands(
        (check("mine.py"), TARGET + "'mine.py'"),
        (check("model.keras:make"), TARGET + "'model.keras:make"),
        (check("nowhere.py:make"), "Received: 'nowhere.py'. Pass"),
        (check("folder.py:make"), "Received: 'folder.py'. Pass"),
        (
            check("json.py:make"),
            "must not be taken. Received: 'json.py', but there is another module 'json'",
        ),
        (check("mine.py:a"), "without a function 'a'"),
        (check("mine.py:NUMBER"), "without a function 'NUMBER'"),
        (check("mine.py:only_a_model"), r"(model, x).*: \['Sequential'\]"),
        (check("mine.py:no_model"), r"(model, x).*: \['str', 'int'\]"),
        (check("mine.py:not_compiled"), ": .* is not compiled"),
        (check("mine.py:of_other_rows"), r"\[\(8, 4\), \(3, 1\)\]"),
        (check("mine.py:leaves"), "The script must not exit. Received: .*:leaves', .*__main__"),
        (check(batch="0"), "--batch-size: " + INTEGER + "'0'"),
        (check(batch="4.5"), INTEGER + r"'4\.5'"),
        (
            check(batch="2"),
            TWO_MICROBATCHES + "8 samples, --batch-size 2, --accumulation-steps 1, "
            "--microbatch-size 2. Pass --accumulation-steps > 1, a smaller --microbatch-size,",
        ),
        (
            "check mine.py:make --batch-size 4",
            TWO_MICROBATCHES + "8 samples, .* no --microbatch-size. Pass",
        ),
        (check(more="--updates -1"), INTEGER + "'-1'"),
        (check(more="--json no/a.json"), "Received: 'no/a.json'"),
        (check(more="--json folder.py"), "which is a folder"),
        (
            check("mine.py:of_float32", more="--dtype float64"),
            "Received: --dtype float64, and a model in float32",
        ),
        ("bench --microbatches 0", "'0'. Pass 1, for example."),
        ("bench --minutes nan", "number. Received: 'nan'"),
        ("bench --plot a.xyz", r"png.* Received: 'a\.xyz'"),
        ("demo --batch-size 0", "--batch-size: " + INTEGER + "'0'"),
        ("demo --batch-size 130", "must be divisible by --accumulation-steps.*Pass.*132"),
        ("demo --accumulation-steps 1", "must be an integer >= 2. Received: '1'"),
        ("demo --accumulation-steps 2.5", r"must be an integer >= 2. Received: '2\.5'"),
        ("demo --epochs 0", "--epochs: must be an integer >= 1"),
        ("demo --seed -1", "must be an integer from 0 to 4294967295. Received: '-1'"),
        ("demo --learning-rate 0", "must be a positive number. Received: '0'"),
        ("demo --learning-rate nan", "must be a positive number. Received: 'nan'"),
        ("demo --optimizer adm", "must be one of .*adam or sgd.*Received: 'adm'"),
        ("demo --optimizer LossScaleOptimizer", "Received: 'lossscaleoptimizer'"),
        ("demo --plot a.xyz", r"must end in a format.*png.*Received: 'a\.xyz'.*a\.png"),
        ("demo --plot demo", "must end in a format.*png.*Received: 'demo'"),
        ("demo --plot no/a.png", "in a folder that exists.*Create the folder 'no'"),
    ),
    *commands(
        ("check a.py:make", "required: --batch-s"),
        ("bench --models deep", "'deep' .choose from"),
        ("chekc", "'chekc' .choose from .*check"),
        ("--epochs", "required: COMMAND"),
        ("bench --jit maybe", "'maybe' .choose from"),
        ("demo --dtype float16", "'float16' .choose from"),
        ("demo --dataset cifar", "'cifar' .choose from"),
        whose=ARGPARSE,
    ),
    *commands(
        (check("mine.py:fails"), "(?s)Traceback.*: .of the scrip"),
        whose=SCRIPTS,
    ),
]


def identity(case):
    """Return a name without the places of objects in memory, which differ between processes."""
    return re.sub(r"\W+", "_", re.sub(r" object at 0x\w+", "", case.name))


@pytest.mark.parametrize("case", CASES, ids=identity)
def test_a_wrong_use_is_refused_and_changes_nothing(case, tmp_path):
    with case.subject(case, tmp_path) as subject:
        with pytest.raises(case.error) as caught:
            case.call(subject)
        message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert re.search(case.words, message), message
        assert bool(HOUSE.search(message)) is (case.whose == "ours"), message


@pytest.mark.gate
def test_the_checks_of_the_table_can_fail(tmp_path):
    """A message of another kind, a change that stays, and code that is executed are found."""
    assert not HOUSE.search("Bad steps. Received: 0. ")
    assert not HOUSE.search("`steps` must be an integer. Pass 1.")
    case = Case("code in a layer", nothing, fits(), ValueError, "")
    for change in (sets("accumulation_steps", 3), fits()):
        with pytest.raises(AssertionError), on(accumulating)(case, tmp_path) as model:
            change(model)
        shared.cache_clear()
    with pytest.raises(AssertionError), accumulator(case, tmp_path) as subject:
        adds()(subject)
    with pytest.raises(AssertionError, match="GA_MODEL_TEST"), files(case, tmp_path) as folder:
        load_model(folder / "code.keras", {"Net": Net}, safe_mode=False)
    del os.environ["GA_MODEL_TEST"]


def test_a_backend_that_a_command_does_not_run_on(monkeypatch):
    for command, backend in (("demo", "mxnet"), ("bench", "jax")):
        monkeypatch.setenv("KERAS_BACKEND", backend)
        text = rf"'{command}' runs on other backends .*KERAS_BACKEND='{backend}'\. Set"
        with pytest.raises(CommandError, match=text):
            run_command(command)


# A `fit` of the user's own.


class DropsCallbacks(keras.Sequential):
    def fit(self, x, y, callbacks=None):
        return super().fit(x, y, batch_size=4, shuffle=False, verbose=0)


class PassesAllOn(keras.Sequential):
    def fit(self, *args, callbacks=None, **kwargs):
        return super().fit(*args, callbacks=callbacks, **kwargs)


def test_a_fit_that_calls_no_callbacks_is_warned_of_where_it_leaves_a_window_open():
    model = accumulating(kind=DropsCallbacks)
    with pytest.warns(UserWarning, match="runs no callbacks and left a window open") as caught:
        model.fit(X, Y)  # 3 batches
    assert HOUSE.search(told(caught)[0])
    model.fit(X, Y)
    model.close_window()
    model.fit(X[:8], Y[:8])  # windows that happen to be full


@pytest.mark.gate
def test_a_fit_that_takes_everything_and_passes_it_on_trains_as_kerass():
    model, reference = (accumulating(kind=kind) for kind in (PassesAllOn, Net))
    for m in (model, reference):
        fit(m)
        m.fit(X, Y, 4, 1, 0)
    assert model.optimizer.iterations == 4
    for w, r in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_array_equal(w, r)
