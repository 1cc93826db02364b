"""Record the step of a model on one microbatch, and weight its results."""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any, cast

import keras
from keras import ops

from ga_model.base import _numbers
from ga_model.base._identity import is_in
from ga_model.base._internals import copy_of, seed_ids
from ga_model.base._types import Gradient, Logs, Nest, Scalar
from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.backend_types import GradientSums
from ga_model.core.batch import num_rows, unpack
from ga_model.core.losses import Kinds, Position
from ga_model.core.modes import Mode, NeedsTotalsError, Numbers, Structure
from ga_model.core.noise import Squares
from ga_model.core.proof.verdict import OF_KERAS, Verdict
from ga_model.core.proof.weighing import Seen, Weighing
from ga_model.core.recorder import Recording, by_optimizer, record
from ga_model.core.splitting import splitting_calls
from ga_model.core.statistics import MomentsRecorder, current_recorder, passing_moments
from ga_model.core.weights import FullBatch
from ga_model.core.window import Amount, Rows, Sums, values_of, with_values


class RecordedStep:
    """Runs the step of a model on a microbatch, records it, and weights its results.

    Attributes:
        found: facts about the microbatch that was run or traced last, or None.
        written: paths of variables that watched steps have written to.
        writes_to: ids of all non-trainable variables that steps have written to.
    """

    def __init__(self, model: keras.Model, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self.found: Structure | None = None
        self.written: set[str] = set()
        self.writes_to: set[int] = set()

    @property
    def structure(self) -> Structure:
        """Facts about the microbatch that was run or traced last."""
        return cast(Structure, self.found)

    def record(
        self,
        mode: Mode,
        unit: Scalar,
        num_counted: Scalar,
        data: Nest,
        numbers: Numbers,
        gradients: GradientSums | None = None,
    ) -> Sums:
        """Run the step on a microbatch, and return its sums.

        Args:
            mode, data, numbers: see `Steps.microbatch`.
            unit: current unit of the window's weights, or zero.
            num_counted: microbatches of the window that have counted so far.
            gradients: sums that the backward pass adds to, or None.
        """
        model = self._model
        full_batch = None
        if mode.is_split:
            totals = functools.partial(_required, numbers.totals)
            full_batch = FullBatch(numbers.rows, mode.updates_alone, totals)
        position = Position(
            numbers.steps,
            numbers.num_microbatches,
            numbers.parts,
            num_counted == 0,
            unit,
            full_batch,
            sums=gradients,
        )
        state = [*model.non_trainable_variables, *model.metrics_variables] if mode.skips else []
        before = [copy_of(variable) for variable in state]
        sums = self._weigh_one(mode, position, data)
        if mode.is_measured:
            if sums.total is None:
                raise ValueError(messages.noise_of_sum_message(model.name))
            applied, least = self.structure.applied, self.structure.bounds[0]
            squares = (
                Squares.of(gradients, part.variables, sums.at_least(least).total, scale)
                for part, (gradients, scale) in zip(applied, by_optimizer(applied, sums.gradients))
            )
            sums = sums._replace(squares=tuple(squares))
        if mode.skips:
            is_finite, sums = _skipped(sums, position.unit)
            for variable, value in zip(state, before):
                variable.assign(_numbers.where(is_finite, copy_of(variable), value))
        return sums

    def _weigh_one(self, mode: Mode, position: Position, data: Nest) -> Sums:
        """Run the step, and weight the microbatch by the verdict."""
        verdict = mode.verdict or OF_KERAS
        written: list[keras.Variable] = []

        def run(data: Nest) -> tuple[Any, ...]:
            nonlocal written
            recording, recorder, logs, written = self._run(mode, position, data)
            is_of_keras = verdict.is_folded or not isinstance(logs, dict)
            own_logs, metric_logs = ({}, None) if is_of_keras else recording.split_logs(logs)
            updates, losses = recording.updates(), recording.losses
            self.found = Structure(
                recording.applied,
                [update for update, _ in updates],
                recorder.calls,
                tuple(own_logs),
                metric_logs,
            )
            counts = [_numbers.float64(count) for _, count in updates]
            numbers = list(zip(recording.numbers(), counts, recording.means()))
            is_weighed = verdict.is_folded or recording.says_weight
            loss_weight = losses.terms().weight if is_weighed else None
            loss_weight = None if loss_weight is None else _numbers.float64(loss_weight)
            weight = recording.relative_weight, recording.unit
            result = recording.gradients, recorder.moments, numbers, own_logs
            has_zero_division = functools.reduce(
                operator.or_, losses.zero_division, _numbers.int32(0) > 0
            )
            entries = losses.entries() if verdict.is_folded else ()
            recording.release()
            return (*result, loss_weight, weight, has_zero_division, entries)

        scalars: dict[str, Scalar] = {}
        if not (verdict.needed_scalars or verdict.watched):
            result = run(data)
        else:
            result, noted = self._backend.noting(run, (data,))
            scalars = noted.scalars
        (
            gradients,
            moments,
            numbers,
            own_logs,
            loss_weight,
            (relative, unit),
            has_zero_division,
            entries,
        ) = result
        seen = Seen(num_rows(unpack(data)[0]), scalars, loss_weight)
        num_news = _numbers.int32(0)
        if mode.is_watched:
            self.written |= {variable.path for variable in written}
            num_news = num_news + _numbers.where(verdict.shows_news(seen, written), 1, 0)
        if not verdict.is_known_in(seen, mode.size is not None):
            self._model._warn_once(messages.unlike_shape_message(self._model.name))
            # A loss that was multiplied by its weight keeps it.
            is_folded = verdict.is_folded
            verdict = OF_KERAS if is_folded else Verdict(Weighing("samples"))
        amounts = [
            Amount._make(map(_numbers.float64, (*mean, count, 1.0)))
            if verdict.is_folded and mean is not None
            else _weighed(value, verdict.of_number(place), seen, position, count)
            for place, (value, count, mean) in enumerate(numbers)
        ]
        amounts += [
            _weighed(own_logs[name], verdict.of_number(name), seen, position)
            for name in self.structure.own_logs
        ]
        keys = *range(len(numbers)), *self.structure.own_logs
        weighings = verdict.weighing, *map(verdict.of_number, keys)
        self.found = self.structure._replace(bounds=tuple(w.least for w in weighings))
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
            shared_epsilon = _numbers.divide_or_zero(_numbers.float64(weighing.epsilon), unit)
            # Each process and replica has a first microbatch.
            share = 1.0 / (self._backend.num_processes * self._backend.num_replicas)
            total = _numbers.divide_or_zero(_numbers.float64(weighing.count(seen)), unit)
            total = total - shared_epsilon * _numbers.where(position.is_first, 1.0 - share, 1.0)
            if weighing.least and not verdict.has_seen_rare:  # the divisor may have no bound
                is_lost = weighing.is_rare(seen) & _numbers.is_not(_are_finite(gradients))
                total = _numbers.where(is_lost, 0.0, total)
        counted = _numbers.int32(1), _numbers.int32(0)
        gradients = [_with_unit(g, total, unit) for g in gradients]
        return Sums(
            gradients,
            total,
            unit,
            *counted,
            has_zero_division,
            num_news,
            moments,
            amounts,
            entries=entries,
        )

    def _run(
        self, mode: Mode, position: Position, data: Nest
    ) -> tuple[Recording, MomentsRecorder, Logs, list[keras.Variable]]:
        """Run a step, recorded.

        Returns:
            The recording, the moments, the logs, and the variables that the step wrote to.
        """
        model, backend, verdict = self._model, self._backend, mode.verdict
        layers = model._batch_normalization_layers()
        splitting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if mode.size is not None:
            most = 2 if mode.is_trial else None
            splitting = splitting_calls(model, backend, data, mode.size, most)
        kinds = None if verdict is None else verdict.kinds
        is_own = verdict is not None and not verdict.is_folded
        options = {"is_own": is_own, "kinds": kinds, "is_trial": mode.is_trial}
        recorder = MomentsRecorder(backend.current_graph, layers)
        with (
            record(model, data, position, backend, **options) as recording,
            current_recorder.set(recorder),
            passing_moments(layers),
            splitting,
        ):
            logs, all_written = backend.run_step(data)
        recorder.restore()
        self.writes_to |= set(map(id, all_written))
        if model.trainable_weights and not (recording.applied or mode.is_trial):
            raise RuntimeError(messages.not_recorded_message(model.name))
        written = self._without_state(all_written, layers) if all_written else []
        if written and verdict is None and not mode.is_trial:  # otherwise the trial compared them
            paths = [variable.path for variable in written]
            model._warn_once(messages.written_message(model.name, paths))
        if layers and backend.num_processes > 1:
            names = [layer.name for layer in layers]
            model._warn_once(messages.own_averages_message(names))
        if mode.size is None:
            normalized = [call.layer for call in recorder.calls]
            written_ids = {id(variable) for variable in all_written}
            unpooled = [
                layer.name
                for layer in layers
                if not is_in(layer, normalized)
                and any(id(variable) in written_ids for variable in layer.non_trainable_variables)
            ]
            for message in messages.batch_normalization_messages(
                [part.name for part in normalized], unpooled
            ):
                model._warn_once(message)
        return recording, recorder, logs, written

    def _without_state(
        self, written: list[keras.Variable], normalizing: list[keras.Layer]
    ) -> list[keras.Variable]:
        """Return the written variables that are not seeds or running averages."""
        excluded = seed_ids(self._model)
        excluded |= {id(v) for layer in normalizing for v in layer.non_trainable_variables}
        return [variable for variable in written if id(variable) not in excluded]

    def weigh(self, data: Nest) -> list[Scalar]:
        """Run a forward pass, and return the weights of the terms of the compiled loss."""
        model = self._model
        position = Position(1.0, 1.0, 1.0, True, _numbers.float64(0.0), None)
        with (
            model._accumulation.holding_back(),
            record(model, data, position, self._backend, kinds=Kinds()) as recording,
        ):
            self._backend.run_step(data)
        weights = [term.weight for term in recording.losses.compiled]
        recording.release()
        return [_numbers.float64(0.0 if weight is None else weight) for weight in weights]


def _weighed(
    value: Scalar, weighing: Weighing, seen: Seen, position: Position, count: Scalar = 1.0
) -> Amount:
    """Return the weighted number of one microbatch, for the sum of the window."""
    if weighing.is_sum:
        numbers = value, position.is_first, count, 1.0
        return Amount._make(map(_numbers.float64, numbers))
    weight, added = (_numbers.float64(w) for w in (weighing.weight(seen), weighing.count(seen)))
    if weighing.least:  # perhaps it is divided by the number without the bound
        is_lost = weighing.is_rare(seen) & _numbers.is_not(ops.isfinite(value))
        added = _numbers.where(is_lost, 0.0, added)
    numerator = _numbers.where(added == 0, 0.0, value * weight)
    rest = _numbers.where(position.is_first, added, added - weighing.epsilon)
    return Amount._make(map(_numbers.float64, (numerator, rest, count, 1.0)))


def _required(totals: list[Scalar] | None) -> list[Scalar]:
    if totals is None:
        raise NeedsTotalsError
    return totals


def _with_unit(gradient: Gradient, total: Scalar | None, unit: Scalar) -> Gradient:
    """Return a sparse gradient with its unit, which is zero if the microbatch does not count."""
    if not isinstance(gradient, Rows):
        return gradient
    counts = True if total is None else total != 0
    return gradient._replace(unit=_numbers.where(counts, unit, 0.0))


def _are_finite(gradients: list[Gradient]) -> Scalar:
    parts = [ops.all(ops.isfinite(values_of(g))) for g in gradients if g is not None]
    return functools.reduce(operator.and_, parts, _numbers.int32(0) == 0)


def _skipped(sums: Sums, unit: Scalar) -> tuple[Scalar, Sums]:
    """Return whether all gradients of a microbatch are finite, and its sums.

    If not, these are zero, in the unit of the window so far, which does not grow for nothing.
    """
    is_finite = _are_finite(sums.gradients)
    counted = keras.tree.map_structure(
        lambda v: None if v is None else _numbers.where_or_zero(is_finite, v), sums
    )
    num_skipped = ops.cast(_numbers.is_not(is_finite), "int32")
    unit = _numbers.where(is_finite, sums.unit, unit)
    return is_finite, counted._replace(num_skipped=num_skipped, unit=unit)
