"""Learning rates, and other variables of optimizers, that a step sets by itself.

A window updates with what they are at its end. That is what the full batch updates with if the step
gives them the same values with each microbatch, before it applies the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch

from ga_model.base._context import ThreadValue
from ga_model.base._in_front import InFront
from ga_model.base._internals import raw
from ga_model.base._internals_torch import times_written
from ga_model.hearing._models import optimizers_in


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer, and of the one in it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    found = [*optimizer.variables, *inner.variables] if optimizer.built else []
    return list({id(variable): variable for variable in found}.values())


class OptimizerWrites:
    """What a step writes to variables of optimizers, from now on.

    Args:
        model: the model.
        kept: values that earlier microbatches of the window have given them, by their id.
        is_first: whether there are none.
    """

    def __init__(self, model: Any, kept: dict[int, Any], is_first: bool) -> None:
        self._optimizers = optimizers_in(list(vars(model).values()))
        self._kept = kept
        self._is_first = is_first
        variables = [v for optimizer in self._optimizers for v in variables_of(optimizer)]
        self._variables = {id(v): v for v in variables}
        self._versions = {key: _version(v) for key, v in self._variables.items()}
        self._values = {key: _copy(v) for key, v in self._variables.items() if _is_scalar(v)}
        self._at_update: dict[int, int] = {}

    def note_update(self, optimizer: Any) -> None:
        """Note that an optimizer is applied now."""
        for variable in variables_of(optimizer):
            self._at_update[id(variable)] = _version(variable)

    def names(self) -> list[str]:
        """Return the names of variables with which a window updates otherwise."""
        found = []
        for key, variable in self._variables.items():
            version = _version(variable)
            if version == self._versions[key]:
                continue
            is_late = self._at_update.get(key, version) != version
            before = self._values.get(key) if self._is_first else self._kept.get(key)
            before = self._values.get(key) if before is None else before
            is_same = before is not None and torch.equal(before, raw(variable))
            if not is_same and (is_late or not self._is_first):
                found.append(variable.path)
            self._kept[key] = _copy(variable)
        return found


def _version(variable: Any) -> int:
    return times_written(raw(variable))


def _copy(variable: Any) -> Any:
    return raw(variable).detach().clone()


def _is_scalar(variable: Any) -> bool:
    return bool(raw(variable).numel() == 1)


_recording = ThreadValue()  # that is told, or None


@contextlib.contextmanager
def refusing_others(recording: Any) -> Iterator[None]:
    """Tell a recording in a block of optimizers that this thread applies past their stand-ins."""
    owner = next(c for c in keras.optimizers.Optimizer.__mro__ if "apply" in vars(c))
    with _in_front.of([owner]), _recording.set(recording):
        yield


def _refusing(_: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
    def refused(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if (recording := _recording.get()) is not None:
            recording.refuse(optimizer)
        return apply(optimizer, *args, **kwargs)

    return refused


_in_front = InFront("apply", _refusing)
