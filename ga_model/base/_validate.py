"""Check arguments. Imports neither TensorFlow nor Keras.

Each error message states what was expected, what was received, and the fix.
"""

from __future__ import annotations

import importlib.metadata
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

_NOT_THE_USERS = {"contextlib", "ga_model", "jax", "jaxlib", "keras", "tensorflow", "torch"}


def warn(message: str) -> None:
    """Warn at the user's line: the first frame outside of Keras, its backends and this package."""
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level + 1)


# The oldest releases on which the tests pass.
_OLDEST = {"keras": (3, 8), "tensorflow": (2, 18)}
_OLDEST_KERAS_ON_JAX = (3, 14)


def check_releases() -> None:
    """Raise ImportError if Keras or TensorFlow is installed by that name and is too old."""
    for name, oldest in _OLDEST.items():
        _check_release(name, oldest)


def _check_release(name: str, oldest: tuple[int, int], where: str = "") -> None:
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return
    if tuple(int(part) for part in installed.split(".")[:2]) < oldest:
        needed = f"{name}>={'.'.join(map(str, oldest))}"
        raise ImportError(
            f"`ga_model` needs {needed}{where}. Received: {installed}. "
            f"Run `pip install '{needed}'`."
        )


def check_backend(backend: str) -> None:
    """Raise RuntimeError for an unsupported backend, ImportError for too old a Keras on JAX."""
    if backend not in ("tensorflow", "torch", "jax"):
        raise RuntimeError(
            "`ga_model` works with the TensorFlow, PyTorch and JAX backends of Keras. "
            f"Received: keras.backend.backend()={backend!r}. Set the environment variable "
            "KERAS_BACKEND to one of them before importing keras."
        )
    if backend == "jax":
        _check_release("keras", _OLDEST_KERAS_ON_JAX, " on the JAX backend")


def check_integer(
    name: str, value: Any, way_out: str = "Pass a positive number.", least: int = 1
) -> int:
    """Return an argument as an int, or raise TypeError (also for a bool) or ValueError."""
    message = (
        f"`{name}` must be an integer >= {least}. "
        f"Received: {name}={value!r} (of type {type(value).__name__}). {way_out}"
    )
    try:
        if isinstance(value, bool):
            raise TypeError
        integer = operator.index(value)
    except (TypeError, AttributeError):  # a float tensor has no `__index__` to call
        raise TypeError(message) from None
    if not least <= integer < 2**63:
        raise ValueError(message)
    return integer


def check_single_accumulation(
    optimizers: Iterable[keras.optimizers.Optimizer], accumulation_steps: int | None = None
) -> None:
    """Raise ValueError if an optimizer would accumulate a second time.

    With `accumulation_steps=1`, the optimizer's own accumulation is plain Keras and is allowed.
    None means a `GradientAccumulator`.
    """
    if accumulation_steps == 1:
        return
    received, way_out = f"accumulation_steps={accumulation_steps}", "set `accumulation_steps=1`"
    if accumulation_steps is None:
        received = "a `GradientAccumulator`"
        way_out = f"use the optimizer without {received}"
    for name, steps in accumulating_optimizers(optimizers):
        raise ValueError(
            "Gradients would be accumulated twice. "
            f"Received: {received} and the optimizer {name!r} with "
            f"gradient_accumulation_steps={steps}. "
            f"Remove `gradient_accumulation_steps` from the optimizer, or {way_out}."
        )


def accumulating_optimizers(
    optimizers: Iterable[keras.optimizers.Optimizer],
) -> list[tuple[str, int]]:
    """Return name and `gradient_accumulation_steps` of the optimizers that accumulate.

    This includes optimizers inside a LossScaleOptimizer or a MultiOptimizer.
    """
    inner = [getattr(optimizer, "inner_optimizer", None) or optimizer for optimizer in optimizers]
    parts = [part for o in inner for part in (o, *(getattr(o, "optimizers", None) or ()))]
    pairs = [(part, getattr(part, "gradient_accumulation_steps", None)) for part in parts]
    return [(part.name, steps) for part, steps in pairs if steps]


def check_bool(name: str, value: Any, way_out: str = "Pass True or False.") -> bool:
    """Return the value of the argument `name`, or raise TypeError if it is not a bool."""
    return bool(check_type(name, value, bool, "a bool", way_out))


def check_type(name: str, value: Any, kind: type, words: str, way_out: str) -> Any:
    """Return the value of the argument `name`, or raise TypeError if it is of another type."""
    if not isinstance(value, kind):
        raise TypeError(
            f"`{name}` must be {words}. "
            f"Received: {name}={value!r} (of type {type(value).__name__}). {way_out}"
        )
    return value


def check_choice(name: str, value: Any, choices: list[str]) -> str:
    """Return the value of the argument `name`, or raise ValueError if it is not in `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"`{name}` must be one of {choices}. Received: {name}={value!r}. Pass {choices[0]!r}."
        )
    return str(value)


def check_schedule(schedule: Any) -> Callable[[int], int]:
    """Return a schedule, a dict or a function, as a function that returns integers >= 1, or raise.

    A dict must have the key 0.
    """
    if not isinstance(schedule, Mapping):
        if not callable(schedule):
            raise TypeError(
                "`schedule` must be a dict or a function. "
                f"Received: schedule={schedule!r} (of type {type(schedule).__name__}). "
                "Pass `{0: 1, 10: 4}`, for example: 4 batches per update from epoch 10 on."
            )
        way_out = "Return the number of batches per update."
        return lambda index: check_integer(f"schedule({index})", schedule(index), way_out)
    way_out = "Count epochs and updates from 0."
    keys = [check_integer("key of schedule", key, way_out, least=0) for key in schedule]
    way_out = "Pass the number of batches per update."
    values = [check_integer(f"schedule[{k}]", v, way_out) for k, v in schedule.items()]
    if 0 not in keys:
        raise ValueError(
            "`schedule` must have a value for the beginning. "
            f"Received: schedule={dict(schedule)!r}, without the key 0. Add `0: 1`."
        )
    steps = dict(zip(keys, values))
    return lambda index: steps[max(key for key in steps if key <= index)]


def check_accumulates(callback: str, model: keras.Model) -> None:
    """Raise TypeError if the model of a callback is not an `AccumulatingModel`."""
    if not hasattr(model, "close_window"):
        raise TypeError(
            f"`{callback}` needs a model that accumulates gradients. "
            f"Received: {model.name!r}, which does not. Call `accumulate(model)` before `fit`."
        )


def check_decay(decay: Any) -> float:
    """Return a `decay` in [0, 1) as a float, or raise TypeError (also for a bool) or ValueError."""
    message = (
        "`decay` must be a number >= 0 and < 1. "
        f"Received: decay={decay!r} (of type {type(decay).__name__}). "
        "Pass 0.99 to average over about the last 100 updates."
    )
    if isinstance(decay, (bool, str)):
        raise TypeError(message)
    try:
        number = float(decay)
    except (TypeError, ValueError):
        raise TypeError(message) from None
    if not 0.0 <= number < 1.0:
        raise ValueError(message)
    return number
