"""What is compiled for a microbatch of one model. Its logs and the update are in `updates`.

A microbatch is one function, whatever comes before and after it: it adds what it gives to the sums
of its window, which it gets and returns. The optimizer is in a function of its own, and so are the
updates of metrics that wait for the full batch. So the forward and backward pass is compiled once
for each shape of microbatches, as in plain Keras, and nothing waits for a condition.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from ga_model.base import _numbers
from ga_model.base._identity import is_in
from ga_model.base._internals import copy_of, forgetting_override, layers_in, seeds
from ga_model.base._messages import batch_normalization_messages
from ga_model.core import messages
from ga_model.core.backend import GROUPS, Backend, GradientSums, Group
from ga_model.core.losses import Kinds, Position
from ga_model.core.modes import Mode, NeedsTotalsError, Numbers, Structure
from ga_model.core.noise import Squares
from ga_model.core.proof.verdict import OF_KERAS, Verdict
from ga_model.core.proof.weighing import Seen, Weighing
from ga_model.core.recorder import Recording, by_optimizer, record
from ga_model.core.statistics import Listener, listening
from ga_model.core.window import Amount, Positions, Rows, Sums, is_list, values_of, with_values
from ga_model.recording import _messages, _weights
from ga_model.recording._attributes import watch_attributes
from ga_model.recording._models import is_of_keras, unpack
from ga_model.recording._split import Batch, num_rows


class Steps:
    """What trains a model, compiled.

    Args:
        model: the model.
        backend: what it runs on.

    Attributes:
        needs_totals: whether a microbatch needs what the terms of the loss weigh in its batch.
        written: paths of variables that watched steps have written to.
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self.needs_totals = False
        self.written: set[str] = set()
        self._structure: Structure | None = None  # of the microbatch that was run or traced last
        self._seen: dict[Any, Structure] = {}  # of microbatches, by modes and shapes
        self._traced: dict[Mode, Structure] = {}  # what was found last
        self._shapes: dict[Any, Sums] = {}  # of what they give, likewise
        self._first: Any = None  # the key of the first microbatch of the batch that was prepared

    # Microbatches.

    @property
    def structure(self) -> Structure:
        """What is known of the microbatch that was run or traced last."""
        assert self._structure is not None
        return self._structure

    def prepare(
        self, mode: Mode, batch: Batch, numbers: Numbers, totals: list[Any] | None
    ) -> tuple[Structure | None, Structure | None]:
        """Trace the step on the microbatches of a batch, each shape once, before anything runs.

        Where steps run eagerly, nothing is known of them before.

        Args:
            mode, numbers, totals: as `microbatch` takes them.
            batch: the batch.

        Returns:
            What is known of its microbatches, and of the last one, which may be smaller.

        Raises:
            NeedsTrialError, NeedsTotalsError: a microbatch cannot run like this.
        """
        if not self._backend.traces:
            watch_attributes(self._model)
            return None, None
        found, keys = [], []
        for index in sorted({0, batch.num_microbatches - 1}):
            unit, num_counted = _numbers.float64(0.0), _numbers.int32(0)
            data = self._backend.as_traced(batch.microbatch(index))
            arguments = (unit, num_counted, data, numbers, totals)
            key = (mode, self._backend.key_of(arguments))
            if key not in self._seen:
                watch_attributes(self._model)
                self._structure = None
                with forgetting_override(self._model):
                    self._shapes[key] = self._backend.shapes(self._recording(mode), arguments)
                # A trace for any number of samples serves others, too.
                self._seen[key] = self._traced[mode] = self._structure or self._traced[mode]
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
        totals: list[Any] | None,
        report: Callable[..., Any] | None = None,
    ) -> tuple[Sums, Any]:
        """Run the step on a microbatch, and add what it gives to the sums of its window.

        Args:
            mode: what the function is made for.
            sums: of the window so far, whose gradients are not to be used again, or None.
            data: the microbatch.
            numbers: of its batch.
            totals: what the terms of the loss weigh in the batch, where it needs them.
            report: takes the amounts before and behind it, and returns the logs of a batch that has
                no other microbatch. Where it cannot be a part of the same function, it is not
                called.

        Returns:
            The sums, and what `report` has returned, or None.
        """
        if sums is None or not self._backend.traces:
            function = functools.partial(self._add, mode)
            add_eagerly: Callable[..., Sums] = self._backend.compiled(
                ("add", mode), function, self._reads(mode)
            )
            return add_eagerly(sums, data, numbers, totals), None
        run_one = self._recording(mode)
        if not self._backend.nests:
            data, given = self._backend.placed(data), sums.without_rows()
            found = run_one(sums.unit, sums.num_counted, data, numbers, totals)
            plus: Callable[..., Sums] = self._backend.compiled(("plus", mode), Sums.plus, [])
            return self._behind(sums, plus(given, found)), None

        def add(gradients: list[Any], others: Sums, *arguments: Any) -> tuple[Sums, Any]:
            before = others._replace(gradients=gradients)
            after = before.plus(run_one(before.unit, before.num_counted, *arguments))
            return after, None if report is None else report(before.amounts, after.amounts)

        run: Callable[..., tuple[Sums, Any]] = self._backend.compiled(
            ("add", report, mode), add, self._reads(mode), consumes=True
        )
        given, data = sums.without_rows(), self._backend.placed(data)
        others = given._replace(gradients=[])
        after, logs = run(given.gradients, others, data, numbers, totals)
        return self._behind(sums, after), logs

    def _behind(self, before: Sums, after: Sums) -> Sums:
        """Return sums with the rows of those before, of which no sum is made."""
        gradients = after.gradients
        for place, (rows, gradient) in enumerate(zip(before.gradients, gradients)):
            if is_list(rows) and is_list(gradient):
                gradients[place] = (*rows, *gradient)
            elif is_list(rows) and rows:  # another microbatch has a dense one
                joined = self._backend.joined(rows, after.unit)
                add = self._backend.compiled("dense", _with_rows, [])
                gradients[place] = add(gradient, joined)
        return after

    def _add(
        self,
        mode: Mode,
        sums: Sums | None,
        data: Any,
        numbers: Numbers,
        totals: list[Any] | None,
    ) -> Sums:
        """Do so where nothing is compiled."""
        unit = 0.0 if sums is None else sums.unit
        num_counted = 0 if sums is None else sums.num_counted
        gradients = self._gradient_sums(mode, None if sums is None else sums.gradients)
        try:
            found = self._record(mode, unit, num_counted, data, numbers, totals, gradients)
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

    def _recording(self, mode: Mode) -> Callable[..., Sums]:
        function = functools.partial(self._record, mode)
        return self._backend.compiled(("record", mode), function, self._reads(mode))

    def _reads(self, mode: Mode) -> tuple[Group, ...]:
        return self._backend.of_step if mode.verdict is None else GROUPS

    def _record(
        self,
        mode: Mode,
        unit: Any,
        num_counted: Any,
        data: Any,
        numbers: Numbers,
        totals: list[Any] | None,
        gradients: GradientSums | None = None,
    ) -> Sums:
        """Run the step on a microbatch, and return what it gives."""
        model = self._model
        whole = None
        if mode.is_split:
            whole = _weights.FullBatch(
                lambda: numbers.rows, mode.is_alone, functools.partial(_known, totals)
            )
        position = Position(
            numbers.steps,
            numbers.num_microbatches,
            numbers.parts,
            num_counted == 0,
            unit,
            whole,
            sums=gradients,
        )
        state = [*model.non_trainable_variables, *model.metrics_variables] if mode.skips else []
        before = [copy_of(variable) for variable in state]
        found = self._weigh_one(mode, position, data)
        if mode.is_measured:
            if found.total is None:
                raise ValueError(_messages.noise_of_sum_message(model.name))
            applied = self.structure.applied
            squares = (
                Squares.of(gradients, part.variables, found.total, scale)
                for part, (gradients, scale) in zip(applied, by_optimizer(applied, found.gradients))
            )
            found = found._replace(squares=tuple(squares))
        if mode.skips:
            is_finite, found = _skipped(found)
            for variable, value in zip(state, before):
                variable.assign(_numbers.where(is_finite, copy_of(variable), value))
        return found

    def _weigh_one(self, mode: Mode, position: Position, data: Any) -> Sums:
        """Run the step, and weigh the microbatch by what it was found to weigh."""
        verdict = mode.verdict or OF_KERAS
        written: list[Any] = []

        def run(data: Any) -> tuple[Any, ...]:
            nonlocal written
            recording, listener, logs, written = self._run(mode, position, data)
            own, of_metrics = ({}, ()) if verdict.is_folded else recording.split_logs(logs)
            updates, losses = recording.updates(), recording.losses
            self._structure = Structure(
                recording.applied,
                [update for update, _ in updates],
                listener.calls,
                losses.entries() if verdict.is_folded else (),
                tuple(own),
                of_metrics,
            )
            counts = [_numbers.float64(count) for _, count in updates]
            numbers = list(zip(recording.numbers(), counts, recording.means()))
            said = losses.terms().weight if verdict.is_folded else recording.weight_of_loss()
            said = None if said is None else _numbers.float64(said)
            weight = recording.relative_weight, recording.unit
            found = recording.gradients, listener.moments, numbers, own
            has_lost = functools.reduce(_numbers.either, losses.lost, _numbers.int32(0) > 0)
            recording.release()
            return (*found, said, weight, has_lost)

        scalars: dict[str, Any] = {}
        is_noted = verdict.needed_scalars or (verdict.watched and self._backend.traces)
        if not is_noted:
            found = run(data)
        else:
            found, scalars = self._backend.noting(run, (data,))
        gradients, moments, numbers, own, said, (relative, unit), has_lost = found
        seen = Seen(num_rows(unpack(data)[0]), scalars, said)
        num_news = _numbers.int32(0)
        if mode.is_watched:
            self.written |= {variable.path for variable in written}
            num_news = num_news + _numbers.where(verdict.news_in(seen, written), 1, 0)
        if not verdict.is_known_in(seen):
            self._model._warn_once(messages.unlike_shape_message(self._model.name, seen.rows))
            # Of a loss with its weight in it, that stands.
            is_folded = verdict.is_folded
            verdict = OF_KERAS if is_folded else Verdict(Weighing("samples"))
        amounts = [
            Amount._make(map(_numbers.float64, (*mean, count, 1.0)))
            if verdict.is_folded and mean is not None
            else _weighed(value, verdict.of_number(place), seen, position, count)
            for place, (value, count, mean) in enumerate(numbers)
        ]
        assert self._structure is not None
        amounts += [
            _weighed(own[name], verdict.of_log(name), seen, position)
            for name in self._structure.own_logs
        ]
        gradients = [with_values(g, _numbers.widened) for g in gradients]
        total, weighing = relative, verdict.weighing
        if not verdict.is_folded and weighing.is_sum:
            total, unit = None, _numbers.float64(1.0)
        elif not verdict.is_folded:
            unit, relative = position.in_unit(_numbers.float64(weighing.weight(seen)))
            gradients = [
                with_values(g, lambda values: values * _numbers.like(values, relative))
                for g in gradients
            ]
            once = _numbers.share(_numbers.float64(weighing.epsilon), unit)
            # Each has a first microbatch.
            share = 1.0 / (self._backend.num_processes * self._backend.num_replicas)
            total = relative - once * _numbers.where(position.is_first, 1.0 - share, 1.0)
        counted = _numbers.int32(1), _numbers.int32(0)
        gradients = [_ended(g, total, unit) for g in gradients]
        return Sums(gradients, total, unit, *counted, has_lost, num_news, moments, amounts)

    def _run(
        self, mode: Mode, position: Position, data: Any
    ) -> tuple[Recording, Listener, Any, list[Any]]:
        """Run a step, recorded.

        Returns:
            What was recorded, what was heard, the logs, and variables that it has written to.
        """
        model, backend, verdict = self._model, self._backend, mode.verdict
        layers = model._batch_normalization_layers()
        splitting: Any = contextlib.nullcontext()
        if mode.size is not None:
            splitting = backend.splitting_calls(mode.size, 2 if mode.is_trial else None)
        kinds = None if verdict is None else verdict.kinds
        is_own = verdict is not None and not verdict.is_folded
        options = {"is_own": is_own, "kinds": kinds, "is_trial": mode.is_trial}
        with (
            record(model, data, position, backend, **options) as recording,
            listening(layers, backend.place) as listener,
            splitting,
        ):
            logs, of_step = backend.run_step(data)
        listener.put_back()
        if model.trainable_weights and not (recording.applied or mode.is_trial):
            raise RuntimeError(_messages.not_recorded_message(model.name, []))
        written = self._without_state(of_step, layers) if of_step else []
        if written and verdict is None and not mode.is_trial:  # else they were compared
            paths = [variable.path for variable in written]
            model._warn_once(_messages.written_message(model.name, paths))
        if layers and backend.num_processes > 1:
            names = [layer.name for layer in layers]
            model._warn_once(messages.own_averages_message(names))
        if mode.size is None:
            heard = [call.layer for call in listener.calls]
            known = {id(variable) for variable in of_step}
            others = [
                layer.name
                for layer in layers
                if not is_in(layer, heard)
                and any(id(variable) in known for variable in layer.non_trainable_variables)
            ]
            for message in batch_normalization_messages([part.name for part in heard], others):
                model._warn_once(message)
        return recording, listener, logs, written

    def _without_state(self, written: list[Any], normalizing: list[Any]) -> list[Any]:
        """Return what a step writes to, but what random numbers are drawn with, and averages."""
        known = {id(s) for layer in layers_in(self._model) for s in seeds(layer)}
        known |= {id(v) for layer in normalizing for v in layer.non_trainable_variables}
        return [variable for variable in written if id(variable) not in known]

    def totals(self, batch: Batch) -> list[Any]:
        """Return what the terms of the compiled loss weigh in a batch: a forward pass over it."""
        backend = self._backend
        weigh = backend.compiled("weigh", self._weigh, backend.of_step, discards=True)
        each = map(batch.microbatch, range(batch.num_microbatches))
        with backend.trying(is_own=False):
            parts = [weigh(backend.placed(data)) for data in each]
        return [sum(weights) for weights in zip(*parts)]

    def _weigh(self, data: Any) -> list[Any]:
        model = self._model
        position = Position(1.0, 1.0, 1.0, True, _numbers.float64(0.0), None)
        with (
            model._accumulation.holding_back(),
            record(model, data, position, self._backend, kinds=Kinds()) as recording,
        ):
            self._backend.run_step(data)
        weights = [term.weight for term in recording.losses.compiled_terms()]
        recording.release()
        return [_numbers.float64(0.0 if weight is None else weight) for weight in weights]


def _with_rows(gradient: Any, rows: Rows) -> Any:
    return gradient + _numbers.dense(rows.values, rows.indices, gradient.shape)


def _weighed(
    value: Any, weighing: Weighing, seen: Seen, position: Position, count: Any = 1.0
) -> Amount:
    """Return what a number of one microbatch counts in that of the window."""
    if weighing.is_sum:
        numbers = value, position.is_first, count, 1.0
        return Amount._make(map(_numbers.float64, numbers))
    weight = _numbers.float64(weighing.weight(seen))
    numerator = _numbers.where(weight == 0, 0.0, value * weight)
    rest = _numbers.where(position.is_first, weight, weight - weighing.epsilon)
    return Amount._make(map(_numbers.float64, (numerator, rest, count, 1.0)))


def _known(totals: list[Any] | None) -> list[Any]:
    if totals is None:
        raise NeedsTotalsError
    return totals


def _ended(gradient: Any, total: Any, unit: Any) -> Any:
    """Return a gradient with the unit that its rows are in, and zero where these do not count."""
    if not isinstance(gradient, (Rows, Positions)):
        return gradient
    values = gradient.values
    if total is not None:
        values = _numbers.if_so(total != 0, values)  # which may be NaN
    return gradient._replace(values=values, unit=unit)


def _skipped(found: Sums) -> tuple[Any, Sums]:
    """Return whether all gradients of a microbatch are finite, and nothing of it if not."""
    values = [values_of(g) for g in found.gradients if g is not None]
    parts = [ops.all(ops.isfinite(v)) for v in values]
    is_finite = functools.reduce(_numbers.both, parts, _numbers.int32(0) == 0)
    counted = keras.tree.map_structure(
        lambda v: None if v is None else _numbers.if_so(is_finite, v), found
    )
    unit = _numbers.where(ops.isfinite(found.unit), found.unit, 1.0)
    return is_finite, counted._replace(
        num_skipped=ops.cast(_numbers.is_not(is_finite), "int32"), unit=unit
    )
