"""Warn if variables change while a window is open, other than by its update.

Causes are another model with the same layers that trains in turn, or a callback that decays weights
after each batch. Microbatches of a window then see different weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
from keras import ops

from ga_model.base._internals import seed_ids
from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.backend_types import Group
from ga_model.core.recorded_step import RecordedStep
from ga_model.core.window import Window

_GROUPS: tuple[Group, ...] = ("trainable", "non_trainable")
_MANY = 65_536  # number of entries above which only the first row is compared


class WeightsWatch:
    """Compares the variables of a model at both ends of a window.

    Reading variables takes time, so this happens in windows 1, 2, 4, 8 and so on.

    Args:
        step: the model's recorded step, whose own writes are not reported.
    """

    def __init__(self, model: keras.Model, backend: Backend, step: RecordedStep) -> None:
        self._model = model
        self._backend = backend
        self._step = step
        self._num_windows = 0  # windows of several batches that have ended
        self._before: dict[int, np.ndarray] = {}  # values by ids of variables

    def begin(self, window: Window) -> None:
        """Read the variables at the start of a window of several batches, if it is due."""
        is_compared = window.steps > 1 and not self._num_windows & (self._num_windows + 1)
        values = self._values() if is_compared else ()
        self._before = {id(variable): value for variable, value in values}

    def end(self, window: Window, has_warned: bool) -> None:
        """Warn if variables have changed that the step itself does not write to.

        Args:
            has_warned: whether the user was already warned that the step is not exact.
        """
        self._num_windows += window.steps > 1
        before, self._before = self._before, {}
        changed = [
            variable.path
            for variable, value in (self._values() if before and not has_warned else ())
            if not np.array_equal(value, before.get(id(variable), value), equal_nan=True)
        ]
        if changed:
            self._model._warn_once(messages.changed_message(self._model.name, changed))

    def _values(self) -> Iterator[tuple[keras.Variable, np.ndarray]]:
        """Yield variables and their values, except seeds and variables that the step writes to."""
        model = self._model
        excluded = seed_ids(model) | self._step.writes_to
        for group in _GROUPS:
            for variable, value in zip(
                getattr(model, f"{group}_variables"), self._backend.values(group)
            ):
                if id(variable) not in excluded and variable.dtype != "string":
                    is_large = int(np.prod(value.shape)) > _MANY
                    yield variable, np.array(ops.convert_to_numpy(value[0] if is_large else value))
