"""Compile the functions that run the microbatches of one model. See `updates` for logs and updates.

One function runs a microbatch, whatever comes before and after it: it takes the sums of the window,
and returns them with the microbatch added. The optimizer is in another function, and so are the
delayed updates of metrics. So the forward and backward pass is compiled once for each shape of
microbatches, as in plain Keras, and needs no condition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import keras

from ga_model.base import _numbers
from ga_model.base._internals import copy_of, forgetting_losses
from ga_model.base._types import Gradient, Logs, Nest, Scalar, Tensor
from ga_model.core.backend import Backend
from ga_model.core.backend_types import GROUPS, GradientSums, Group
from ga_model.core.batch import Batch
from ga_model.core.models import is_of_keras
from ga_model.core.modes import Mode, Numbers, Structure
from ga_model.core.recorded_step import RecordedStep
from ga_model.core.window import Amount, Rows, Sums, is_list


class Steps:
    """Compiled functions that run microbatches.

    Args:
        logs_of: returns the logs of a batch, see `Updates.logs_of`.

    Attributes:
        needs_totals: whether microbatches need the weights of the loss terms in their batch.
        step: the model's step, recorded.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        logs_of: Callable[[Structure, list[Amount] | None, list[Amount]], Logs],
    ) -> None:
        self._model = model
        self._backend = backend
        self._logs_of = logs_of
        self.needs_totals = False
        self.step = RecordedStep(model, backend)
        self._structures: dict[Hashable, Structure] = {}  # by mode and shapes of a microbatch
        self._latest: dict[Mode, Structure] = {}  # the latest, by mode
        self._shapes: dict[Hashable, Sums] = {}  # shapes of their sums, by the same keys
        self._first_key: Hashable = None  # key of the prepared batch's first microbatch

    # State.

    def state(self) -> list[Tensor]:
        """Return the values of the state of layers and metrics."""
        read = self._backend.compiled("state", lambda: list(map(copy_of, self._state())), GROUPS)
        values: list[Tensor] = read()
        return values

    def restore(self, values: list[Tensor]) -> None:
        """Restore the state of layers and metrics."""

        def assign(values: list[Tensor]) -> None:
            for variable, value in zip(self._state(), values):
                variable.assign(value)

        self._backend.compiled("restore", assign, GROUPS)(values)

    def _state(self) -> list[keras.Variable]:
        return [*self._model.non_trainable_variables, *self._model.metrics_variables]

    # Microbatches.

    def prepare(
        self, mode: Mode, batch: Batch, numbers: Numbers
    ) -> tuple[Structure | None, Structure | None]:
        """Trace the step on each shape of a batch's microbatches, before any of them runs.

        Does nothing where steps run eagerly.

        Args:
            mode, numbers: see `microbatch`.

        Returns:
            Facts about the microbatches, and about the last one, which may be smaller, or None.

        Raises:
            NeedsTrialError, NeedsTotalsError: if microbatches cannot run yet.
        """
        if not self._backend.traces:
            return None, None
        structures, keys = [], []
        for index in sorted({0, batch.num_microbatches - 1}):
            data = self._backend.as_traced(batch.microbatch(index))
            key = (mode, self._backend.key_of((data, numbers.totals)))
            if key not in self._structures:
                unit, num_counted = _numbers.float64(0.0), _numbers.int32(0)
                arguments = (unit, num_counted, data, numbers)
                self.step.found = None
                with forgetting_losses(self._model):
                    self._shapes[key] = self._recording(mode).shapes(arguments)
                # A trace for any number of samples serves other sizes, too.
                self._structures[key] = self._latest[mode] = self.step.found or self._latest[mode]
            structures.append(self._structures[key])
            keys.append(key)
        self._first_key = keys[0]
        return structures[0], structures[-1]

    def begin(self) -> Sums | None:
        """Return the initial sums of a window, or None if they are not allocated in advance."""
        if not self._backend.traces:
            return None
        shapes = self._shapes[self._first_key].without_rows()
        sums: Sums = self._backend.zeros(("begin", self._first_key), shapes)
        return sums

    def microbatch(
        self,
        mode: Mode,
        sums: Sums | None,
        data: Nest,
        numbers: Numbers,
        sole_structure: Structure | None = None,
    ) -> tuple[Sums, Logs]:
        """Run the step on a microbatch, and add its results to the sums of the window.

        Args:
            mode: settings that the function is compiled for.
            sums: sums of the window so far, whose gradients are consumed, or None.
            data: the microbatch.
            numbers: numbers of its batch.
            sole_structure: facts about the microbatch, if its batch has no other.

        Returns:
            The sums, and the logs of such a batch if the same function can compute them, else None.
        """
        if sums is None or not self._backend.traces:
            function = functools.partial(self._add, mode)
            add_eagerly: Callable[..., Sums] = self._backend.compiled(
                ("add", mode), function, self._reads(mode)
            )
            return add_eagerly(sums, data, numbers), None
        run_one = self._recording(mode)
        if not self._backend.nests:
            data, dense_sums = self._backend.on_device(data), sums.without_rows()
            microbatch_sums = run_one(sums.unit, sums.num_counted, data, numbers)
            plus: Callable[..., Sums] = self._backend.compiled(("plus", mode), Sums.plus, [])
            return self._with_earlier_rows(sums, plus(dense_sums, microbatch_sums)), None

        def add(gradients: list[Gradient], rest: Sums, *arguments: Any) -> tuple[Sums, Logs]:
            before = rest._replace(gradients=gradients)
            after = before.plus(run_one(before.unit, before.num_counted, *arguments))
            if sole_structure is None:
                return after, None
            return after, self._logs_of(sole_structure, before.amounts, after.amounts)

        run: Callable[..., tuple[Sums, Logs]] = self._backend.compiled(
            ("add", id(sole_structure), mode), add, self._reads(mode), consumes=True
        )
        dense_sums, data = sums.without_rows(), self._backend.on_device(data)
        rest = dense_sums._replace(gradients=[])
        after, logs = run(dense_sums.gradients, rest, data, numbers)
        return self._with_earlier_rows(sums, after), logs

    def _with_earlier_rows(self, before: Sums, after: Sums) -> Sums:
        """Return sums with the sparse rows of earlier microbatches, which are kept separately."""
        gradients = after.gradients
        for index, (rows, gradient) in enumerate(zip(before.gradients, gradients)):
            if is_list(rows) and is_list(gradient):
                gradients[index] = (*rows, *gradient)
            elif is_list(rows) and rows:  # another microbatch has a dense gradient
                joined = self._backend.joined(rows, after.unit)
                add = self._backend.compiled("dense", _with_rows, [])
                gradients[index] = add(gradient, joined)
        return after

    def _add(self, mode: Mode, sums: Sums | None, data: Nest, numbers: Numbers) -> Sums:
        """Add a microbatch to the sums of its window where steps run eagerly."""
        unit = 0.0 if sums is None else sums.unit
        num_counted = 0 if sums is None else sums.num_counted
        gradients = self._gradient_sums(mode, None if sums is None else sums.gradients)
        try:
            result = self.step.record(mode, unit, num_counted, data, numbers, gradients)
        finally:
            added = None if gradients is None else gradients.end()
        if added is None:
            return result.counted() if sums is None else sums.plus(result)
        nothing = [None for _ in added]  # left to add
        result = result._replace(gradients=nothing)
        if sums is not None:
            result = sums._replace(gradients=nothing).plus(result)
        return result._replace(gradients=added)

    def _gradient_sums(self, mode: Mode, totals: list[Gradient] | None) -> GradientSums | None:
        """Return sums that the backward pass adds to, if the microbatch certainly counts.

        Not for custom steps, which may read their gradients.
        """
        is_folded = mode.verdict is None or mode.verdict.is_folded
        is_sure = is_folded and not (mode.skips or mode.is_measured or mode.is_trial)
        if not (is_sure and is_of_keras(self._model, "train_step")):
            return None
        return self._backend.gradient_sums(totals)

    def _recording(self, mode: Mode) -> Any:
        function = functools.partial(self.step.record, mode)
        return self._backend.compiled(("record", mode), function, self._reads(mode))

    def _reads(self, mode: Mode) -> tuple[Group, ...]:
        return self._backend.step_groups if mode.verdict is None else GROUPS

    def totals(self, batch: Batch) -> list[Scalar]:
        """Return the weights of the compiled loss's terms in a batch, by a forward pass."""
        backend = self._backend
        weigh = backend.compiled("weigh", self.step.weigh, backend.step_groups)
        microbatches = map(batch.microbatch, range(batch.num_microbatches))
        with backend.restoring(is_own=False):
            weights_of_each = [weigh(backend.copied(backend.on_device(d))) for d in microbatches]
        return [sum(weights) for weights in zip(*weights_of_each)]


def _with_rows(gradient: Gradient, rows: Rows) -> Tensor:
    return gradient + _numbers.dense(rows.values, rows.indices, gradient.shape)
