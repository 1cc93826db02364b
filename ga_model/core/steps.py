"""What is compiled for a microbatch of one model. Its logs and the update are in `updates`.

A microbatch is one function, whatever comes before and after it: it adds what it gives to the sums
of its window, which it gets and returns. The optimizer is in a function of its own, and so are the
updates of metrics that wait for the full batch. So the forward and backward pass is compiled once
for each shape of microbatches, as in plain Keras, and nothing waits for a condition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ga_model.base import _numbers
from ga_model.base._internals import forgetting_losses
from ga_model.core.backend import Backend
from ga_model.core.backend_types import GROUPS, GradientSums, Group
from ga_model.core.batch import Batch
from ga_model.core.models import is_of_keras
from ga_model.core.modes import Mode, Numbers, Structure
from ga_model.core.recorded_step import RecordedStep
from ga_model.core.window import Rows, Sums, is_list


class Steps:
    """What trains a model, compiled.

    Args:
        logs_of: returns the logs of a batch, as `Updates.logs_of` does.

    Attributes:
        needs_totals: whether a microbatch needs what the terms of the loss weigh in its batch.
        step: the model's own step, recorded.
    """

    def __init__(self, model: Any, backend: Backend, logs_of: Callable[..., Any]) -> None:
        self._model = model
        self._backend = backend
        self._logs_of = logs_of
        self.needs_totals = False
        self.step = RecordedStep(model, backend)
        self._seen: dict[Any, Structure] = {}  # of microbatches, by modes and shapes
        self._traced: dict[Mode, Structure] = {}  # what was found last
        self._shapes: dict[Any, Sums] = {}  # of what they give, likewise
        self._first: Any = None  # the key of the first microbatch of the batch that was prepared

    # Microbatches.

    def prepare(
        self, mode: Mode, batch: Batch, numbers: Numbers
    ) -> tuple[Structure | None, Structure | None]:
        """Trace the step on the microbatches of a batch, each shape once, before anything runs.

        Where steps run eagerly, nothing is known of them before.

        Args:
            mode, numbers: as `microbatch` takes them.

        Returns:
            What is known of its microbatches, and of the last one, which may be smaller.

        Raises:
            NeedsTrialError, NeedsTotalsError: a microbatch cannot run like this.
        """
        if not self._backend.traces:
            return None, None
        found, keys = [], []
        for index in sorted({0, batch.num_microbatches - 1}):
            data = self._backend.as_traced(batch.microbatch(index))
            key = (mode, self._backend.key_of((data, numbers.totals)))
            if key not in self._seen:
                unit, num_counted = _numbers.float64(0.0), _numbers.int32(0)
                arguments = (unit, num_counted, data, numbers)
                self.step.found = None
                with forgetting_losses(self._model):
                    self._shapes[key] = self._recording(mode).shapes(arguments)
                # A trace for any number of samples serves others, too.
                self._seen[key] = self._traced[mode] = self.step.found or self._traced[mode]
            found.append(self._seen[key])
            keys.append(key)
        self._first = keys[0]
        return found[0], found[-1]

    def begin(self) -> Sums | None:
        """Return the sums of a window that has no microbatch, if they are to be there before."""
        if not self._backend.traces:
            return None
        shapes = self._shapes[self._first].without_rows()
        sums: Sums = self._backend.zeros(("begin", self._first), shapes)
        return sums

    def microbatch(
        self,
        mode: Mode,
        sums: Sums | None,
        data: Any,
        numbers: Numbers,
        alone: Structure | None = None,
    ) -> tuple[Sums, Any]:
        """Run the step on a microbatch, and add what it gives to the sums of its window.

        Args:
            mode: what the function is made for.
            sums: of the window so far, whose gradients are not to be used again, or None.
            numbers: of its batch.
            alone: what is known of it, if its batch has no other microbatch.

        Returns:
            The sums, and the logs of such a batch, where these can be a part of the same function;
            otherwise None.
        """
        if sums is None or not self._backend.traces:
            function = functools.partial(self._add, mode)
            add_eagerly: Callable[..., Sums] = self._backend.compiled(
                ("add", mode), function, self._reads(mode)
            )
            return add_eagerly(sums, data, numbers), None
        run_one = self._recording(mode)
        if not self._backend.nests:
            data, given = self._backend.placed(data), sums.without_rows()
            found = run_one(sums.unit, sums.num_counted, data, numbers)
            plus: Callable[..., Sums] = self._backend.compiled(("plus", mode), Sums.plus, [])
            return self._behind(sums, plus(given, found)), None

        def add(gradients: list[Any], others: Sums, *arguments: Any) -> tuple[Sums, Any]:
            before = others._replace(gradients=gradients)
            after = before.plus(run_one(before.unit, before.num_counted, *arguments))
            if alone is None:
                return after, None
            return after, self._logs_of(alone, before.amounts, after.amounts)

        run: Callable[..., tuple[Sums, Any]] = self._backend.compiled(
            ("add", id(alone), mode), add, self._reads(mode), consumes=True
        )
        given, data = sums.without_rows(), self._backend.placed(data)
        others = given._replace(gradients=[])
        after, logs = run(given.gradients, others, data, numbers)
        return self._behind(sums, after), logs

    def _behind(self, before: Sums, after: Sums) -> Sums:
        """Return sums with the rows of earlier microbatches, which are kept and not summed."""
        gradients = after.gradients
        for place, (rows, gradient) in enumerate(zip(before.gradients, gradients)):
            if is_list(rows) and is_list(gradient):
                gradients[place] = (*rows, *gradient)
            elif is_list(rows) and rows:  # another microbatch has a dense one
                joined = self._backend.joined(rows, after.unit)
                add = self._backend.compiled("dense", _with_rows, [])
                gradients[place] = add(gradient, joined)
        return after

    def _add(self, mode: Mode, sums: Sums | None, data: Any, numbers: Numbers) -> Sums:
        """Add a microbatch to the sums of its window where nothing is compiled."""
        unit = 0.0 if sums is None else sums.unit
        num_counted = 0 if sums is None else sums.num_counted
        gradients = self._gradient_sums(mode, None if sums is None else sums.gradients)
        try:
            found = self.step.record(mode, unit, num_counted, data, numbers, gradients)
        finally:
            added = None if gradients is None else gradients.end()
        if added is None:
            return found.counted() if sums is None else sums.plus(found)
        nothing = [None for _ in added]  # was left
        found = found._replace(gradients=nothing)
        if sums is not None:
            found = sums._replace(gradients=nothing).plus(found)
        return found._replace(gradients=added)

    def _gradient_sums(self, mode: Mode, totals: list[Any] | None) -> GradientSums | None:
        """Return sums that the backward pass adds to, where a microbatch is sure to count.

        A step of the user's own may look at its gradients.
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
        return self._backend.of_step if mode.verdict is None else GROUPS

    def totals(self, batch: Batch) -> list[Any]:
        """Return the weights of the compiled loss's terms in a batch, by a forward pass."""
        backend = self._backend
        weigh = backend.compiled("weigh", self.step.weigh, backend.of_step, discards=True)
        each = map(batch.microbatch, range(batch.num_microbatches))
        if not backend.traces:  # losses may write to what they get, which is to be trained on
            each = map(backend.copied, each)
        with backend.trying(is_own=False):
            parts = [weigh(backend.placed(data)) for data in each]
        return [sum(weights) for weights in zip(*parts)]


def _with_rows(gradient: Any, rows: Rows) -> Any:
    return gradient + _numbers.dense(rows.values, rows.indices, gradient.shape)
