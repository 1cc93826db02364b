"""What a case of the suite is, the ways to set it, and what has to come out on each backend."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import keras
import numpy as np
import pytest
from conftest import set_dtype
from helpers import (
    TOLERANCE,
    assert_changed,
    assert_equal,
    dense_data,
    num_updates,
    relative_difference,
    seeded,
    told,
)
from keras import ops
from training import reordered, rounded, train

BACKEND = keras.backend.backend()
PRECISION = "float64" if BACKEND == "tensorflow" else "float32"  # of tests with one
WINDOW = 12  # samples of an update
# Of an epoch: windows of 12, 12 and 7, or 8 where devices have to share each batch evenly.
SAMPLES = 32 if helpers.num_replicas > 1 and BACKEND == "jax" else 31


# Arguments of `accumulate`, of which windows of 12 samples are made.
SETTINGS: dict[str, dict[str, Any]] = {
    "windows": {"accumulation_steps": 3},
    "split": {"microbatch_size": 5},
    "both": {"accumulation_steps": 3, "microbatch_size": 3},
    "recomputed": {"microbatch_size": 5, "loss_over": "batch"},
    "batches of three": {"accumulation_steps": 4},
    "batches of one": {"accumulation_steps": 12},
    "microbatches of one": {"microbatch_size": 1},
    "added up": {"microbatch_size": 5, "loss_over": "microbatch"},
    "recomputed windows": {"accumulation_steps": 3, "microbatch_size": 3, "loss_over": "batch"},
    "left out": {"microbatch_size": 5, "skip_nonfinite": True},
    "windows that may be left out": {"accumulation_steps": 3, "skip_nonfinite": True},
}
USUAL = (*("windows", "split", "both", "recomputed"), *("batches of one", "microbatches of one"))


def rows_of(settings):
    """Return the samples of a batch."""
    return WINDOW // settings.get("accumulation_steps", 1)


ALL = ("weights", "variables", "seeds", "optimizer", "updates", "logs")
BUT_LOGS = tuple(name for name in ALL if name != "logs")


@dataclasses.dataclass(frozen=True)
class Warns:
    """Warnings are given, each of them once.

    Attributes:
        text: what they all match.
        compares: what is that of the full batch nevertheless.
    """

    text: str
    compares: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refused:
    """An error is raised whose text matches.

    Attributes:
        is_late: whether batches were trained before.
    """

    text: str
    is_late: bool = False


@dataclasses.dataclass(frozen=True)
class FallsShort:
    """What is expected does not happen yet.

    Attributes:
        kind: what happens: a "false alarm" (a warning, though all is exact), what is "inexact" with
            a warning or "silent" without, or it is "refused" by an error.
        reason: why.
    """

    kind: str
    reason: str


EXACT = Warns("")
LEAST = 1e-4  # of what differs, as a warning says
ROUNDOFF = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}  # of any number


def sgd(loss="mse", learning_rate=0.1, **kwargs):
    """Return a function that returns fresh arguments of `compile`.

    Args:
        loss: a name, a function, or a list or dict of them; of a `Loss`, whose precision is that
            of the time it is made, a function without arguments in a tuple.
    """

    def arguments():
        made = loss[0]() if isinstance(loss, tuple) else loss
        optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9)
        return {"optimizer": optimizer, "loss": made, **kwargs}

    return arguments


MSE = sgd()

# What is said where the core runs, and tries a step both ways.
TRIED = "does not train as the full batch"
# What is said where weights are those of the full batch.
LOGGED = "trains as the full batch, but logs other numbers"

DIFFERS = {"across": Warns(TRIED)}


def whole(text="cannot be split into"):
    """Return what is expected where a call runs on the full batch."""
    return {"within": Warns(text, ALL)}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A training, and what has to come out of it where that is not what plain Keras gives.

    Attributes:
        make: function that returns a fresh model, the same one every time.
        data: function from a number of samples to (x, y), (x, y, sample_weight) or (x,).
        compile: function that returns fresh arguments of `compile`.
        fit: further arguments of `fit`.
        samples: of an epoch.
        expects: `Warns` or `Refused`, by the name of a setting, "within" or "across" (batches), or
            that of a backend; all else is exact, without a warning.
        falls_short: what happens instead for now, by the same names.
        compares: what has to be that of the full batch.
        precision: the policy's, where it is neither float32 nor float64.
        backends: those that have what the case is about.
        settings: those that it is about.
    """

    make: Callable[[], Any]
    data: Callable[[int], tuple] = dense_data
    compile: Callable[[], dict[str, Any]] = MSE
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: int = SAMPLES
    expects: dict[str, Warns | Refused] = dataclasses.field(default_factory=dict)
    falls_short: dict[str, FallsShort] = dataclasses.field(default_factory=dict)
    compares: tuple[str, ...] = ALL
    precision: str | None = None
    backends: tuple[str, ...] = ("tensorflow", "torch", "jax")
    settings: tuple[str, ...] = USUAL

    def of_setting(self, table, setting, default):
        """Return what a table by settings and backends has for one, the closest name first."""
        place = "across" if "accumulation_steps" in SETTINGS[setting] else "within"
        return table.get(setting, table.get(place, table.get(BACKEND, default)))


class Trained(NamedTuple):
    """What a training leaves behind.

    Attributes:
        weights: of trainable variables, as NumPy arrays.
        variables: others of the model, without seeds.
        seeds: of random numbers.
        optimizer: the variables of optimizers.
        updates: the number of them.
        logs: of epochs.
        of_updates: the logs of the batches that make updates, by epoch and samples until then.
        warnings: texts for users.
    """

    weights: list[np.ndarray]
    variables: list[np.ndarray]
    seeds: list[np.ndarray]
    optimizer: list[np.ndarray]
    updates: int = 0
    logs: dict[str, list[float]] | None = None
    of_updates: dict[tuple[int, int], dict[str, np.ndarray]] | None = None
    warnings: tuple[str, ...] = ()


def values_of(variables):
    """Return copies of the values of variables: float64, or integers and booleans."""
    values = helpers.values_of(variables)
    return [v if v.dtype.kind in "iub" else v.astype("float64") for v in values]


def state_of(model):
    seeds = [v for v in model.non_trainable_variables if "seed_generator" in v.path]
    others = [v for v in model.non_trainable_variables if "seed_generator" not in v.path]
    kind = keras.optimizers.Optimizer
    values = [v for v in vars(model).values() if isinstance(v, (list, kind))]
    optimizers = [v for v in keras.tree.flatten(values) if isinstance(v, kind)]
    return Trained(
        values_of(model.trainable_variables),
        values_of(others),
        values_of(seeds),
        values_of(variable for optimizer in optimizers for variable in optimizer.variables),
        sum(num_updates(optimizer) for optimizer in optimizers if optimizer.built),
    )


class OfUpdates(keras.callbacks.Callback):
    """Keeps the logs of batches that fill a window of 12 samples, or end an epoch."""

    def __init__(self, samples, rows):
        super().__init__()
        self.samples, self.rows, self.seen, self.epoch = samples, rows, {}, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        seen = min((batch + 1) * self.rows, self.samples)
        if seen % WINDOW == 0 or seen == self.samples:
            self.seen[self.epoch, seen] = {
                name: ops.convert_to_numpy(value) for name, value in logs.items()
            }


def trained(case, data, **settings):
    """Return what a training through `fit` leaves behind, plain without settings."""
    rows = rows_of(settings)
    of_updates = OfUpdates(len(keras.tree.flatten(data)[0]), rows)
    fit = {**case.fit, "callbacks": [*case.fit.get("callbacks", ()), of_updates]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model, _ = train(
            case.make, case.compile, data, rows=rows, fit_args=fit, builds=False, **settings
        )
    return state_of(model)._replace(
        logs=model.history.history, of_updates=of_updates.seen, warnings=tuple(told(caught))
    )


def largest(found, expected, start):
    """Return the largest relative difference of a change; numbers that count must be equal.

    What is not there at the start, such as an optimizer's state, begins with zeros.
    """
    start = start or [np.zeros_like(value) for value in expected]
    differences = [0.0]
    for value, reference, begun in zip(found, expected, start, strict=True):
        if not np.all(np.isfinite(value)):
            differences.append(np.inf)
        elif reference.dtype == np.float64:
            differences.append(relative_difference([value], [reference], [begun]))
        else:
            differences.append(0.0 if np.array_equal(value, reference) else np.inf)
    return max(differences)


def difference_of_logs(found, expected):
    """Return the largest relative difference of two dicts of numbers, or of lists of them."""
    assert found.keys() == expected.keys()
    pairs = [np.asarray((found[name], values), "float64") for name, values in expected.items()]
    return max((np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-3)) for a, b in pairs), default=0.0)


def differences(found, expected, start):
    """Return in what two trainings differ: relative numbers, by what they are of."""
    logs = [difference_of_logs(found.logs, expected.logs)]
    logs += [difference_of_logs(found.of_updates[at], of) for at, of in expected.of_updates.items()]
    return {
        "weights": largest(found.weights, expected.weights, start.weights),
        "variables": largest(found.variables, expected.variables, start.variables),
        "seeds": largest(found.seeds, expected.seeds, start.seeds),
        "optimizer": largest(found.optimizer, expected.optimizer, []),
        "updates": abs(found.updates - expected.updates),
        "logs": max(logs),
    }


@functools.lru_cache(maxsize=4)
def plain(case, dtype):
    """Return the state that a case starts with, and what plain Keras makes of it in a precision."""
    data = case.data(case.samples)
    model = seeded(case.make)
    if not model.built:
        model(keras.tree.map_structure(lambda x: x[:1], data[0]))
    return state_of(model), trained(case, data)


def roundings(case, dtype):
    """Yield how far rounding alone moves plain Keras, in one way after the other.

    That is in half precision, which rounds each gradient, three times its difference from float32:
    trainings of which one is as far from float32 as plain Keras is, and the other twice as far, are
    at most so far from each other. Then with the samples of each batch in another order, and with
    all numbers of the data off by a rounding.
    """
    start, expected = plain(case, dtype)
    data = case.data(case.samples)
    if dtype.startswith("mixed"):
        set_dtype("float32")
        scales = functools.partial(scaled, case.compile, dtype)
        other = trained(dataclasses.replace(case, compile=scales), data)
        set_dtype(dtype)
        yield {name: 3 * value for name, value in differences(other, expected, start).items()}
    for changed in (
        *(reordered(data, 12, seed) for seed in range(3)),
        *(rounded(data, seed) for seed in range(24)),
    ):
        yield differences(trained(case, changed), expected, start)


def scaled(compile_args, dtype):
    """Return arguments of `compile` with the optimizer that Keras makes for a precision."""
    given = compile_args()
    is_scaled = isinstance(given["optimizer"], keras.optimizers.LossScaleOptimizer)
    if dtype == "mixed_float16" and not is_scaled:
        given["optimizer"] = keras.optimizers.LossScaleOptimizer(given["optimizer"])
    return given


def new_warnings(found, expected):
    """Return the warnings of a training that another one has not, whatever models are called."""
    texts = [[re.sub(r"_\d+", "", text) for text in state.warnings] for state in (found, expected)]
    return [text for text, same in zip(found.warnings, texts[0]) if same not in texts[1]]


def compared(case, setting, dtype, compares):
    """Train a case plainly and with a setting.

    Returns:
        The new warnings, all differences, and those that are more than what is allowed, beside it.
    """
    start, expected = plain(case, dtype)
    assert_changed(expected.weights, start.weights)
    found = trained(case, case.data(case.samples), **SETTINGS[setting])
    seen = differences(found, expected, start)
    allowed = dict.fromkeys(ALL, {**TOLERANCE, **ROUNDOFF}[dtype])

    def too_much():
        pairs = {name: (seen[name], allowed[name]) for name in compares}
        return {name: pair for name, pair in pairs.items() if not pair[0] <= pair[1]}

    measured = roundings(case, dtype)
    while too_much() and (other := next(measured, None)):  # each is a training
        allowed = {name: max(allowed[name], other[name]) for name in ALL}
    return new_warnings(found, expected), seen, too_much()


def kind_of(case, setting, dtype):
    """Return what happens in a case that falls short, as `FallsShort` names it."""
    try:
        warned, _, too_much = compared(case, setting, dtype, case.compares)
    except (ValueError, RuntimeError):
        return "refused"
    if too_much:
        return "inexact" if warned else "silent"
    return "false alarm" if warned else "nothing"


def assert_refused(case, setting, refused):
    """Train a case that is refused, and assert that nothing was trained before, unless it may."""
    holder = keras.callbacks.Callback()  # of the model
    held = dataclasses.replace(case, fit={**case.fit, "callbacks": [holder]})
    with pytest.raises((ValueError, RuntimeError), match=refused.text):
        trained(held, case.data(case.samples), **SETTINGS[setting])
    if holder.model is not None and not refused.is_late:
        state, start = state_of(holder.model), state_of(seeded(case.make))
        assert_equal(state.weights, start.weights)


def check(case, setting, dtype):
    """Train a case plainly and with a setting, and compare it with what is expected.

    What is told without being exact has to differ: else it is a false alarm.

    Returns:
        All differences.
    """
    expects = case.of_setting(case.expects, setting, EXACT)
    short = case.of_setting(case.falls_short, setting, None)
    if short is not None:
        assert kind_of(case, setting, dtype) == short.kind
        pytest.xfail(short.reason)
    if isinstance(expects, Refused):
        assert_refused(case, setting, expects)
        return {}
    compares = case.compares if expects is EXACT else expects.compares
    warned, seen, too_much = compared(case, setting, dtype, compares)
    if expects is EXACT:
        assert warned == []
    else:
        assert warned
        assert [text for text in warned if not re.search(expects.text, text)] == []
        assert len(set(warned)) == len(warned)
        assert "weights" in compares or not all(value <= LEAST for value in seen.values())
    assert too_much == {}
    return seen
