"""Warn of variables that something else than its update changes while a window is open.

Such are a model with the same layers that trains in turn, and a callback that decays weights after
each batch: microbatches of one window then see different weights, which the full batch does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from keras import ops

from ga_model.base._internals import ids_of_seeds
from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.backend_types import Group
from ga_model.core.recorded_step import RecordedStep
from ga_model.core.window import Window

_GROUPS: tuple[Group, ...] = ("trainable", "non_trainable")
_MANY = 65_536  # entries of a variable, of which more are not compared but by their first row


class WeightsWatch:
    """Compares the variables of a model at both ends of a window.

    As they are read from the device, it does so in the windows 1, 2, 4, 8 and so on.

    Args:
        step: the model's step, recorded, which may write to variables itself.
    """

    def __init__(self, model: Any, backend: Backend, step: RecordedStep) -> None:
        self._model = model
        self._backend = backend
        self._step = step
        self._num_windows = 0  # of several batches, that have ended
        self._before: dict[int, Any] = {}  # by the ids of variables

    def begin(self, window: Window) -> None:
        """Read the variables if a window of several batches begins that is to be compared."""
        is_compared = window.steps > 1 and not self._num_windows & (self._num_windows + 1)
        values = self._values() if is_compared else ()
        self._before = {id(variable): value for variable, value in values}

    def end(self, window: Window, is_told: bool) -> None:
        """Warn if variables have changed that the step itself does not write to.

        Args:
            is_told: whether a warning says already that the step is not exact.
        """
        self._num_windows += window.steps > 1
        before, self._before = self._before, {}
        changed = [
            variable.path
            for variable, value in (self._values() if before and not is_told else ())
            if not np.array_equal(value, before.get(id(variable), value), equal_nan=True)
        ]
        if changed:
            self._model._warn_once(messages.changed_message(self._model.name, changed))

    def _values(self) -> Iterator[tuple[Any, Any]]:
        """Yield variables, but random states and those that the step writes to, and values."""
        model = self._model
        left = ids_of_seeds(model) | self._step.writes_to
        for group in _GROUPS:
            for variable, value in zip(
                getattr(model, f"{group}_variables"), self._backend.values(group)
            ):
                if id(variable) not in left and variable.dtype != "string":
                    is_large = int(np.prod(value.shape)) > _MANY
                    yield variable, np.array(ops.convert_to_numpy(value[0] if is_large else value))
