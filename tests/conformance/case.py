"""What a case of the suite is, the ways to set it, and what has to come out on each backend."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from conftest import set_dtype
from helpers import (
    TOLERANCE,
    assert_changed,
    num_updates,
    relative_difference,
    seeded,
    told,
)
from keras import ops
from training import reordered, rounded, train

BACKEND = keras.backend.backend()
SAMPLES = 31  # of an epoch: windows of 12, 12 and 7


class Setting(NamedTuple):
    """How windows of 12 samples are made.

    Attributes:
        rows: samples per batch.
        settings: of `accumulate`.
        is_within: whether a batch is a window, so that a step can see the full batch.
    """

    rows: int
    settings: dict[str, Any]
    is_within: bool


SETTINGS = {
    "windows": Setting(4, {"accumulation_steps": 3}, False),
    "split": Setting(12, {"microbatch_size": 5}, True),
    "both": Setting(4, {"accumulation_steps": 3, "microbatch_size": 3}, False),
    "recomputed": Setting(12, {"microbatch_size": 5, "loss_over": "batch"}, True),
    "batches of one": Setting(1, {"accumulation_steps": 12}, False),
    "microbatches of one": Setting(12, {"microbatch_size": 1}, True),
}


@dataclasses.dataclass(frozen=True)
class Told:
    """Warnings are given, each of them once.

    Attributes:
        text: what they all match.
        compares: what is that of the full batch nevertheless.
    """

    text: str
    compares: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refused:
    """An error is raised whose text matches."""

    text: str


EXACT = Told("")
OWN_LOSS = {"jax: across": Refused("custom `compute_loss`")}
ROUNDOFF = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}  # of any number
ALL = ("weights", "variables", "seeds", "optimizer", "logs")


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

# What the trials and readers of today's engines do not see, or take for what it is not.
ONE_SAMPLE = {"torch: batches of one": "a batch of one sample has no halves to compare"}
DIVISORS = {
    "torch: across": "gradients of halves do not tell what a loss is divided by",
    "jax: across": "the reader of jaxprs takes the loss for one that compares samples",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A training, and what has to come out of it where that is not what plain Keras gives.

    Attributes:
        make: function that returns a fresh model, the same one every time.
        data: function from a number of samples to (x, y), (x, y, sample_weight) or (x,).
        compile: function that returns fresh arguments of `compile`.
        fit: further arguments of `fit`.
        samples: of an epoch.
        expects: `Told` or `Refused`, by the name of a setting, "within" or "across" (batches), or
            such a name behind a backend and a colon; all else is exact, without a warning.
        falls_short: reasons why what is expected does not happen yet, by the same names.
        compares: what has to be that of the full batch.
        precision: the policy's, where it is neither float32 nor float64.
        backends: those that have what the case is about.
        settings: those that it is about.
    """

    make: Callable[[], Any]
    data: Callable[[int], tuple]
    compile: Callable[[], dict[str, Any]] = MSE
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: int = SAMPLES
    expects: dict[str, Told | Refused] = dataclasses.field(default_factory=dict)
    falls_short: dict[str, str] = dataclasses.field(default_factory=dict)
    compares: tuple[str, ...] = ALL
    precision: str | None = None
    backends: tuple[str, ...] = ("tensorflow", "torch", "jax")
    settings: tuple[str, ...] = tuple(SETTINGS)

    def of_setting(self, table, setting, default):
        """Return what a table by settings and backends has for one, the closest name first."""
        place = "within" if SETTINGS[setting].is_within else "across"
        for name in (setting, place):
            for key in (f"{BACKEND}: {name}", name):
                if key in table:
                    return table[key]
        return table.get(BACKEND, default)


class Trained(NamedTuple):
    """What a training leaves behind.

    Attributes:
        weights: of trainable variables, as NumPy arrays.
        variables: others of the model, without seeds.
        seeds: of random numbers.
        optimizer: the variables of the optimizer.
        updates: the number of them.
        logs: of epochs.
        warnings: texts for users.
    """

    weights: list[np.ndarray]
    variables: list[np.ndarray]
    seeds: list[np.ndarray]
    optimizer: list[np.ndarray]
    updates: int = 0
    logs: dict[str, list[float]] | None = None
    warnings: tuple[str, ...] = ()


def values_of(variables):
    """Return copies of the values of variables: float64, or integers and booleans."""
    values = [ops.convert_to_numpy(variable) for variable in variables]
    return [np.array(v, None if v.dtype.kind in "iub" else "float64") for v in values]


def state_of(model):
    seeds = [v for v in model.non_trainable_variables if "seed_generator" in v.path]
    others = [v for v in model.non_trainable_variables if "seed_generator" not in v.path]
    optimizer = getattr(model, "optimizer", None)
    return Trained(
        values_of(model.trainable_variables),
        values_of(others),
        values_of(seeds),
        values_of(optimizer.variables if optimizer else []),
        num_updates(optimizer) if optimizer else 0,
    )


def trained(case, data, rows, **settings):
    """Return what a training through `fit` leaves behind, plain without settings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model, _ = train(
            case.make, case.compile, data, rows=rows, fit_args=case.fit, builds=False, **settings
        )
    return state_of(model)._replace(logs=model.history.history, warnings=tuple(told(caught)))


def largest(found, expected, start):
    """Return the largest relative difference of a change; numbers that count must be equal.

    What is not there at the start, such as an optimizer's state, begins with zeros.
    """
    start = start or [np.zeros_like(value) for value in expected]
    differences = [0.0]
    for value, reference, begun in zip(found, expected, start, strict=True):
        if reference.dtype == np.float64:
            differences.append(relative_difference([value], [reference], [begun]))
        else:
            differences.append(0.0 if np.array_equal(value, reference) else np.inf)
    return max(differences)


def differences(found, expected, start):
    """Return in what two trainings differ: relative numbers, by what they are of."""
    assert found.updates == expected.updates
    assert found.logs.keys() == expected.logs.keys()
    logs = [
        np.max(np.abs(np.subtract(found.logs[name], values)) / np.maximum(np.abs(values), 1e-3))
        for name, values in expected.logs.items()
    ]
    has_same_optimizer = len(found.optimizer) == len(expected.optimizer)
    return {
        "weights": largest(found.weights, expected.weights, start.weights),
        "variables": largest(found.variables, expected.variables, start.variables),
        "seeds": largest(found.seeds, expected.seeds, start.seeds),
        "optimizer": largest(found.optimizer, expected.optimizer, [])
        if has_same_optimizer
        else np.inf,
        "logs": max(logs, default=0.0),
    }


@functools.lru_cache(maxsize=8)
def plain(case, dtype, changed=lambda data: data):
    """Return the state that a case starts with, and what plain Keras makes of it.

    Args:
        dtype: the policy that is set, as models follow it.
        changed: what its data goes through.
    """
    data = case.data(case.samples)
    model = seeded(case.make)
    if not model.built:
        model(keras.tree.map_structure(lambda x: x[:1], data[0]))
    return state_of(model), trained(case, changed(data), 12)


def rounding(case, dtype):
    """Return how much rounding makes of a case: what plain Keras differs from itself.

    That is with the samples of each batch in another order, and with all numbers of the data off
    by a rounding; and in half precision, which rounds each gradient, three times its difference
    from float32: trainings of which one is as far from float32 as plain Keras is, and the other
    twice as far, are at most so far from each other.
    """
    start, expected = plain(case, dtype)
    changes = [functools.partial(reordered, rows=12, seed=seed) for seed in range(3)]
    changes += [functools.partial(rounded, seed=seed) for seed in range(6)]
    others = [(1, plain(case, dtype, change)[1]) for change in changes]
    if dtype.startswith("mixed"):
        set_dtype("float32")
        others.append((3, plain(case, "float32")[1]))
        set_dtype(dtype)
    found = [(factor, differences(other, expected, start)) for factor, other in others]
    return {name: max(factor * each[name] for factor, each in found) for name in ALL}


def news(found, expected):
    """Return the warnings of a training that another one has not, whatever models are called."""
    texts = [[re.sub(r"_\d+", "", text) for text in state.warnings] for state in (found, expected)]
    return [text for text, same in zip(found.warnings, texts[0]) if same not in texts[1]]


def check(case, setting, dtype):
    """Train a case plainly and with a setting, and compare it with what is expected.

    Returns:
        All differences.
    """
    expects = case.of_setting(case.expects, setting, EXACT)
    rows, settings, _ = SETTINGS[setting]
    data = case.data(case.samples)
    if isinstance(expects, Refused):
        with pytest.raises((ValueError, RuntimeError, TypeError), match=expects.text):
            trained(case, data, rows, **settings)
        return {}
    start, expected = plain(case, dtype)
    found = trained(case, data, rows, **settings)
    assert_changed(expected.weights, start.weights)
    said = news(found, expected)
    if expects is EXACT:
        assert said == []
    else:
        assert said
        assert [text for text in said if not re.search(expects.text, text)] == []
        assert len(set(said)) == len(said)
    compares = case.compares if expects is EXACT else expects.compares
    seen = differences(found, expected, start)
    allowed = dict.fromkeys(ALL, {**TOLERANCE, **ROUNDOFF}[dtype])
    if any(seen[name] > allowed[name] for name in compares):
        allowed = {
            name: max(allowed[name], rounded) for name, rounded in rounding(case, dtype).items()
        }
    too_much = {
        name: (seen[name], allowed[name]) for name in compares if not seen[name] <= allowed[name]
    }
    assert too_much == {}
    return seen
