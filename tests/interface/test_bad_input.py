"""Wrong uses: each is refused with a message that helps, and leaves nothing half changed.

`CASES` is the table. Of every row the test holds that

* the error is of the type and has the words that stand there;
* the message says what is expected, what was received and what to do, in this order, unless it is
  that of the user's own script, or of Keras, whose own tests have most (`test_keras_own.py`);
* settings, weights, the optimizer's state and metrics are what they were;
* a model then trains, by the way out that the message names, exactly as one that was never misused.
"""

import contextlib
import functools
import io
import itertools
import operator
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_equal, dense_data, dense_model, ruled, seeded, told, values_of

from ga_model import (
    AccumulatingModel,
    AccumulationScheduler,
    GradientAccumulator,
    GradientNoiseScale,
    accumulate,
    check_equivalence,
)
from ga_model.cli._main import main

layers, optimizers = keras.layers, keras.optimizers
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
        is_ours: whether this package words the message.
    """

    name: str
    subject: Any
    call: Callable[[Any], Any]
    error: type[BaseException]
    words: str
    fix: Callable[[Any], Any] = lambda subject: None
    is_ours: bool = True


# What is misused.


class Net(AccumulatingModel, keras.Sequential):
    """The mixin on a model class."""


class TakesNoCallbacks(keras.Sequential):
    def fit(self, x, y, batch_size, shuffle, verbose):
        return super().fit(x, y, batch_size=batch_size, shuffle=shuffle, verbose=verbose)


class OwnTrainFunction(keras.Sequential):
    def make_train_function(self, force=False):
        super().make_train_function(force)
        train = self.train_function
        self.train_function = lambda iterator: train(iterator)
        return self.train_function


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

    def __init__(self, make, twin):
        self.model, self.expected = make(), weights_after_fit(twin)
        self.variables = list(self.model.variables)
        if optimizer := getattr(self.model, "optimizer", None):
            optimizer.build(self.model.trainable_variables)
            self.variables += optimizer.variables
        self.start = values_of(self.variables)

    def restart(self):
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)
        self.model.reset_metrics()

    def state(self):
        """Return what a refused call must not change."""
        names = [*BAD_IN_FILES, "compiled", "has_updated"]
        counted = [v for v in self.model.metrics_variables if np.any(v.numpy())]
        values = [(v.path, v.numpy().tolist()) for v in [*self.variables, *counted]]
        return type(self.model), [getattr(self.model, name, None) for name in names], values


def after_fit(model):
    fit(model)
    return model.get_weights()


@functools.cache
def weights_after_fit(make):
    return after_fit(make())


@functools.cache
def shared(make):
    """Return a model that is misused in several cases and traced once."""
    return Misused(make, make)


def on(make, twin=None):
    """Return a subject: the model that `make` returns, the same one in all of its cases.

    Args:
        make: function that returns a model.
        twin: function that returns one that trains as this one when it is fixed, if it cannot
            before. Each case then has a model of its own.
    """

    @contextlib.contextmanager
    def subject(case, tmp_path):
        misused = Misused(make, twin) if twin else shared(make)
        misused.restart()
        before = misused.state()
        yield misused.model
        assert misused.state() == before
        case.fix(misused.model)
        assert_equal(after_fit(misused.model), misused.expected)

    return subject


def nothing(case, tmp_path):
    return contextlib.nullcontext()


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
import sys
import keras
import numpy as np

def make():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, np.ones((8, 4)), np.ones((8, 1))

of_other_rows = lambda: (*make()[:2], np.ones((3, 1)))
of_float32 = lambda: keras.config.set_dtype_policy("float32") or make()
not_compiled = lambda: (keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), make()[1])
no_model = lambda: ("model", 1)
leaves = lambda: sys.exit(0)
fails = lambda: {}["of the script's own"]
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


def loads(name):
    """Return a call that makes a model of what its file would have, but for a bad setting."""

    def call(model):
        config = keras.saving.serialize_keras_object(model)
        config["compile_config"][name] = BAD_IN_FILES[name]
        return keras.saving.deserialize_keras_object(config, {"Net": Net})

    return call


# What is done.


def of_model(function):
    """Return what gives calls of a function of a model, by its other arguments."""
    return lambda *args, **kwargs: lambda model: function(model, *args, **kwargs)


def of_nothing(make):
    """Return what gives calls of a class, by its arguments."""
    return lambda *args, **kwargs: lambda _: make(*args, **kwargs)


fits, sets, accumulates_by = of_model(fit), of_model(setattr), of_model(accumulate)
schedules, measures = of_nothing(AccumulationScheduler), of_nothing(GradientNoiseScale)
compiles = functools.partial(operator.methodcaller, "compile")
trains_on = functools.partial(operator.methodcaller, "train_on_batch")


def adds(gradients=None, variables=None, **kwargs):
    """Return a call of `add`, on right gradients and variables but for those that are given."""

    def call(subject):
        accumulator, right = subject
        wrong = [TWO, ONE] if gradients is None else gradients
        given = {"weight": 1.0, **kwargs}
        accumulator.add(wrong, right if variables is None else variables, **given)

    return call


def fits_dataset(make, *args):
    return lambda model: model.fit(make(*args), shuffle=False, verbose=0)


def fits_by(schedule):
    return lambda model: fit(model, callbacks=[AccumulationScheduler(schedule)])


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


def has(name, value):
    """Return a call that sets an attribute of a model, and fits it."""
    return lambda model: (setattr(model, name, value), fit(model))


def again(model):
    model.compile("adam", "mse", metrics=["mae"])


def makes(*bases, **attributes):
    return lambda _: type("Wrong", bases, attributes)()


def accumulates(value):
    return lambda _: accumulate(value, accumulation_steps=2)


def applies(optimizer):
    return lambda subject: subject[0].apply(optimizer)


def batches_of(rows):
    """Return a dataset whose batches have two rows more in x than in y."""
    signature = (tf.TensorSpec((rows, 4)), tf.TensorSpec((None, 2)))
    return tf.data.Dataset.from_generator(lambda: [(X, Y[:10])], output_signature=signature)


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

V = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
ONE, TWO = tf.ones(1), tf.ones(2)
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
OWN_TRAIN_FUNCTION = "whose class overrides `make_train_function`, which would not be called"
OTHER_VARIABLES = r"to the same variables, in the same order. Received: different variables\."
SAME_OPTIMIZERS = "must apply the same optimizers, .* Received: `train_step` of 'net'"
NO_OPTIMIZER = "takes a Keras optimizer. Received: optimizer="
INTEGER = "must be an integer >= 1. Received: "
ONE_OF = r"must be one of \['auto', 'microbatch', 'batch'\]. Received: "
TWO_MICROBATCHES = "must have at least two microbatches.* Received: "
NO_ARRAYS = "with samples on axis 0. Received: x, y, sample_weight of types "
TARGET = "must be passed as FILE.py:function. Received: "
ON_THE_CLASS = "a setting of each model.* Received: class Wrong with accumulation_steps=4"
NO_CALLBACKS = r"Received: .* that does not\. Let it take `\*\*kwargs`"
NO_NUMBER = "`microbatch_weight` must return a number.* Received: 'mean'"
BY_OTHERS = "in a compiled function. Received: a call of `train_step` of 'net' by other code"
ONE_OPTIMIZER = "needs a single optimizer.* Received: 2 optimizers"
CONFIG = {"class_name": "SGD", "config": {"gradient_accumulation_steps": 2}}
PLAIN = sets("accumulation_steps", 1)

BAD = [  # settings, what they must be, the error, and values
    ("accumulation_steps", INTEGER, ValueError, [0, 10**30]),
    ("accumulation_steps", INTEGER, TypeError, [2.0, True, "4", np.array([4]), tf.constant(3.0)]),
    ("microbatch_size", INTEGER, ValueError, [-3]),
    ("microbatch_size", INTEGER, TypeError, [2.0, [4], "Auto", b"auto", np.array("auto")]),
    ("skip_nonfinite", "must be a bool. Received: ", TypeError, [1, "yes", np.True_]),
    ("loss_over", ONE_OF, ValueError, ["Batch", "", 1, ["batch"]]),
]


def settings_cases():
    """Yield a case for each bad value of each setting, in every way to set it."""
    ways = {
        "accumulate": (plain, lambda name, value: accumulates_by(**{name: value})),
        "compile": (split, lambda name, value: compiles("sgd", "mae", **{name: value})),
        "attribute": (accumulating, sets),
    }
    for setting, kind, error, values in BAD:
        for value, (way, (make, call)) in itertools.product(values, ways.items()):
            words = rf"`{setting}` {kind}{setting}={re.escape(repr(value))}"
            name = f"{setting}={value!r} by {way}"
            yield Case(name, on(make), call(setting, value), error, words)


def cases(subject, *rows, **more):
    """Return a case for each row: name, call, error, words, and maybe the way out."""
    return [Case(name, subject, *rest, **more) for name, *rest in rows]


def commands(*rows, **more):
    """Return a case for each row: the line behind `python -m ga_model`, and words."""
    return [
        Case(line, command, lambda run, line=line: run(line), CommandError, words, **more)
        for line, words in rows
    ]


def each(name, call, error, words, *values):
    """Return a row for each value, which the message repeats behind the words."""
    return [
        (f"{name} {value!r}", call(value), error, words + re.escape(repr(value)[:10]))
        for value in values
    ]


CASES = [
    *settings_cases(),
    # Models.
    *cases(
        nothing,
        ("the mixin behind Model", makes(keras.Model, AccumulatingModel), TypeError, SIDE),
        ("on a layer", makes(AccumulatingModel, layers.Layer), TypeError, NO_KERAS_MODEL),
        ("on the class", makes(Net, accumulation_steps=4), TypeError, ON_THE_CLASS),
        ("a path", accumulates("a.keras"), TypeError, "'a.keras'.* Turn it into a `keras.Model`"),
        ("a class", accumulates(Net), TypeError, NO_MODEL + ".* Call the class"),
        *each("accumulate", accumulates, TypeError, NO_MODEL, None, layers.Dense(1), of_two()),
    ),
    *cases(
        on(accumulating, accumulating),
        (
            "train_step on the instance",
            has("train_step", lambda data: {}),
            TypeError,
            "must be a method of the model's class. Received: .* assigned to the instance",
            lambda model: delattr(model, "train_step"),
        ),
    ),
    *cases(
        on(functools.partial(accumulating, kind=OwnTrainFunction), plain),
        ("its own train function", fits(), TypeError, OWN_TRAIN_FUNCTION, PLAIN),
    ),
    *cases(
        on(functools.partial(accumulating, kind=TakesNoCallbacks), plain),
        ("a fit that takes no callbacks", fits(), TypeError, NO_CALLBACKS, PLAIN),
    ),
    *cases(
        on(functools.partial(accumulating, kind=ruled(Net, lambda model, x, y: "mean")), plain),
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
    ),
    *cases(
        on(accumulating, accumulating),
        ("by another optimizer", has("optimizer", of_two()), ValueError, BY_2, again),
        (
            "by a configuration",
            lambda model: (model.compile(CONFIG, "mse", metrics=["mae"]), fit(model)),
            ValueError,
            BY_2,
            again,
        ),
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
    *cases(
        on(skipping, skipping),
        ("by compile", compiles(scaling(), "mse"), ValueError, SCALING),
        ("by another optimizer", has("optimizer", scaling()), ValueError, SCALING, again),
    ),
    *cases(nothing, ("by the policy", compiles_in_half_precision, ValueError, SCALING)),
    # Data.
    *cases(
        on(split, split),
        ("rows of y", trains_on(X, Y[:10]), ValueError, SHAPES + r"\(10, 2"),
        ("of nested inputs", trains_on({"a": X, "b": X[:7]}, Y), ValueError, SHAPES + r"\(7, 4"),
        ("of sample weights", trains_on(X, Y, np.ones(5)), ValueError, SHAPES + r".*, \(5,\)\]"),
        *(
            (f"of {n} of a dataset", fits_dataset(batches_of, n), ValueError, SHAPES + r"\(10, 2")
            for n in (None, 12)
        ),
        (
            "scalars only",
            fits_dataset(tf.data.Dataset.from_tensors, (1.0, 2.0)),
            ValueError,
            ROWS + r"shapes \[\]",
        ),
    ),
    # The order of calls.
    *cases(
        on(automatic, automatic),
        ("a step of others", lambda m: tf.function(m.train_step)((X, Y)), RuntimeError, BY_OTHERS),
    ),
    *cases(
        on(not_compiled, accumulating),
        ("fit before compile", fits(), ValueError, r"must call `compile\(\)`", again),
        is_ours=False,
    ),
    *cases(
        on(eager, eager),
        ("layers frozen in a window", freezes_inside_of_a_window, RuntimeError, SAME_OPTIMIZERS),
    ),
    # `GradientAccumulator`.
    *cases(
        open_window,
        ("other variables", adds([TWO, None], V), ValueError, OTHER_VARIABLES),
        ("a sum after a mean", adds([TWO, None], weight=None), ValueError, "Received: both"),
        ("a late gradient", adds([TWO, ONE]), RuntimeError, "Received: a gradient for .'Variable"),
        ("an optimizer that accumulates", applies(of_two()), ValueError, BY_CLASS),
        ("one inside of another", applies(scaling(of_two())), ValueError, BY_CLASS),
        ("a class", applies(optimizers.SGD), TypeError, NO_OPTIMIZER + ".* Call the class first"),
        *each("apply", applies, TypeError, NO_OPTIMIZER, None),
    ),
    *cases(
        accumulator,
        (
            "apply traced before add",
            lambda s: tf.function(lambda: s[0].apply(optimizers.SGD()))(),
            RuntimeError,
            "Received: a call that was traced before any gradient was added",
        ),
        *each(
            *("a weight of", lambda weight: adds(weight=weight), ValueError, WEIGHT),
            *("3", [1.0], TWO, 1j, {"rows": 3}, b"3", np.array("3")),
        ),
        ("fewer gradients", adds([TWO]), ValueError, PER_VARIABLE + "1 gradients and 2 variables"),
        ("None", lambda s: s[0].add(None, s[1], weight=1), TypeError, PER_VARIABLE + "'NoneType'"),
        ("a generator", adds(g for g in [TWO, ONE]), TypeError, PER_VARIABLE + "'generator'"),
        ("a dict of gradients", adds({0: TWO, 1: ONE}), TypeError, PER_VARIABLE + "'dict'"),
        ("swapped arguments", adds(V, [TWO, ONE]), TypeError, NO_VARIABLES + "EagerTensor"),
        ("no variables", adds(variables=[None, None]), TypeError, NO_VARIABLES + "NoneType"),
        ("one that broadcasts", adds([ONE, ONE]), ValueError, OF_SHAPE + r"\(1,\) for .* \(2,\)"),
    ),
    # The gradient noise scale.
    *cases(
        nothing,
        *each("a decay of", measures, ValueError, DECAY, 1, -0.5, float("nan")),
        *each("a decay of", measures, TypeError, DECAY, "0.9", True, None),
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
        ("zero steps", schedules({0: 0}), ValueError, r"`schedule\[0\]` " + INTEGER + r".*=0"),
        ("an epoch below 0", schedules({0: 1, -1: 2}), ValueError, "integer >= 0. .*schedule=-1"),
        ("half an epoch", schedules({0: 1, 2.5: 2}), TypeError, r"integer >= 0. .*schedule=2\.5"),
        ("by an array", schedules({0: 1}, by=X), ValueError, "`by` must be one of .*: by=array"),
        ("a log of text", schedules({0: 1}, log="yes"), TypeError, "bool. Received: log='yes'"),
    ),
    *cases(
        on(accumulating),
        ("of nothing", fits_by(lambda i: None), TypeError, r"Received: schedule\(0\)=None"),
        ("of zeros", fits_by(lambda i: 0), ValueError, r"Received: schedule\(0\)=0"),
        ("noise twice", fits_measured(2), RuntimeError, "a second one for"),
    ),
    *cases(
        on(plain),
        (
            "a schedule for a plain model",
            fits_by({0: 2}),
            TypeError,
            "needs a model that accumulates gradients. Received: .*Call `accumulate",
        ),
        # `check_equivalence`.
        ("over nothing", equals(loss_over="rows"), ValueError, "`loss_over` must be one of"),
        ("one microbatch", equals(microbatch_size=4), ValueError, TWO_MICROBATCHES + "12 samples"),
        ("a check of a size to find", equals(microbatch_size="auto"), ValueError, UNKNOWN_SIZE),
        ("no rows", equals(X[:0], Y[:0]), ValueError, TWO_MICROBATCHES + "0 samples"),
        ("batches of 0", equals(batch_size=0), ValueError, INTEGER + "batch_size=0"),
        ("half an update", equals(updates=2.5), TypeError, INTEGER + r"updates=2\.5"),
        ("other rows", equals(X, Y[:4]), ValueError, r"same number .* shapes \[\(12, 4\), \(4, 2"),
        ("a dataset", equals(tf.data.Dataset.range(3)), TypeError, NO_ARRAYS + "_RangeDataset"),
        ("lists", equals(X.tolist(), Y.tolist()), TypeError, NO_ARRAYS + "list, list"),
        ("no targets", equals(X), ValueError, "needs targets. Received: y=None for"),
    ),
    *cases(
        nothing,
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
        on(accumulating),
        ("steps in a file", loads("accumulation_steps"), ValueError, INTEGER + "accumul.*=0"),
        ("size in a file", loads("microbatch_size"), TypeError, INTEGER + "microb.*='4'"),
        ("skip in a file", loads("skip_nonfinite"), TypeError, "bool. Received: skip_.*=1"),
        ("loss in a file", loads("loss_over"), ValueError, "one of .*loss_over='all'"),
    ),
    # The command line.
    *commands(
        (check("mine.py"), TARGET + "'mine.py'"),
        (check("nowhere.py:make"), "Received: 'nowhere.py'. Pass"),
        (check("folder.py:make"), "Received: 'folder.py'. Pass"),
        (check("json.py:make"), "not be taken. Received: 'json.py', but .* another module 'json'"),
        (check("mine.py:a"), "without a function 'a'"),
        (check("mine.py:no_model"), r"(model, x).*: \['str', 'int'\]"),
        (check("mine.py:not_compiled"), ": .* is not compiled"),
        (check("mine.py:of_other_rows"), r"\[\(8, 4\), \(3, 1\)\]"),
        (check("mine.py:leaves"), "The script must not exit. Received: .*:leaves', .*__main__"),
        (check(batch="0"), "--batch-size: " + INTEGER + "'0'"),
        (
            check(batch="2"),
            TWO_MICROBATCHES + "8 samples, --batch-size 2, --accumulation-steps 1, "
            "--microbatch-size 2. Pass --accumulation-steps > 1, a smaller --microbatch-size,",
        ),
        (
            "check mine.py:make --batch-size 4",
            TWO_MICROBATCHES + "8 samples, .* no --microbatch-size. Pass",
        ),
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
        ("demo --seed -1", "must be an integer from 0 to 4294967295. Received: '-1'"),
        ("demo --learning-rate nan", "must be a positive number. Received: 'nan'"),
        ("demo --optimizer adm", "must be one of .*adam or sgd.*Received: 'adm'"),
        ("demo --optimizer LossScaleOptimizer", "Received: 'lossscaleoptimizer'"),
        ("demo --plot a.xyz", r"must end in a format.*png.*Received: 'a\.xyz'.*a\.png"),
        ("demo --plot no/a.png", "in a folder that exists.*Create the folder 'no'"),
    ),
    *commands((check("mine.py:fails"), "(?s)Traceback.*: .of the scrip"), is_ours=False),
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
        assert bool(HOUSE.search(message)) is case.is_ours, message


@pytest.mark.gate
def test_the_checks_of_the_table_can_fail(tmp_path):
    """A message of another kind and a change that stays are found."""
    assert not HOUSE.search("Bad steps. Received: 0. ")
    assert not HOUSE.search("`steps` must be an integer. Pass 1.")
    case = Case("a change", nothing, fits(), ValueError, "")
    for change in (sets("accumulation_steps", 3), fits()):
        with pytest.raises(AssertionError), on(accumulating)(case, tmp_path) as model:
            change(model)
        shared.cache_clear()
    with pytest.raises(AssertionError), accumulator(case, tmp_path) as subject:
        adds()(subject)


def test_a_backend_that_a_command_does_not_run_on(monkeypatch):
    for command, backend in (("demo", "mxnet"), ("bench", "jax")):
        monkeypatch.setenv("KERAS_BACKEND", backend)
        text = rf"'{command}' runs on other backends .*KERAS_BACKEND='{backend}'\. Set"
        with pytest.raises(CommandError, match=text):
            run_command(command)


class DropsCallbacks(keras.Sequential):
    """Has a `fit` of its own, which drops the callbacks that it takes."""

    def fit(self, *args, callbacks=None, **kwargs):
        return super().fit(*args, **kwargs)


def test_a_fit_that_calls_no_callbacks_is_warned_of_where_it_leaves_a_window_open():
    model = accumulating(kind=DropsCallbacks)
    with pytest.warns(UserWarning, match="runs no callbacks and left a window open") as caught:
        fit(model)  # 3 batches
    assert HOUSE.search(told(caught)[0])
    fit(model)
    model.close_window()
    fit(model, X[:8], Y[:8])  # windows that happen to be full
