"""Compile the logs of a batch and the update of a window."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import keras
from keras import ops

from ga_model.base import _numbers
from ga_model.base._internals import (
    copy_of,
    layers_in,
    overwrites,
    read_in_float16,
    variables_to_train,
)
from ga_model.base._method_patch import MethodPatch
from ga_model.base._types import Gradient, Logs, Nest, Scalar, Tensor
from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.backend_types import GROUPS
from ga_model.core.modes import Structure
from ga_model.core.noise import GradientNoise, averaged, squared_norm
from ga_model.core.recorder import by_optimizer, nested_logs
from ga_model.core.splitting import splitting_calls
from ga_model.core.window import Amount, Sums, is_list


class Counters(NamedTuple):
    """Counters since `compile`: int32 scalars.

    Attributes:
        skipped: microbatches that were skipped.
        zero_division: windows with a weight, in which the denominator of a loss term was zero in
            a microbatch.
        uneven: windows in which the proportions of the terms' numbers of values differ.
    """

    skipped: Scalar
    zero_division: Scalar
    uneven: Scalar


class Updates:
    """Compiled functions for the logs of a batch and the update of a window.

    Args:
        model: the model.
        backend: the backend of the model.
    """

    def __init__(self, model: keras.Model, backend: Backend) -> None:
        self._model = model
        self._backend = backend
        self._checks = MethodPatch("check_finite", self._as_checked)

    # Logs.

    def report(self, structure: Structure, before: list[Amount] | None, now: list[Amount]) -> Logs:
        """Return the logs by `logs_of`, compiled as a function of its own."""
        function = functools.partial(self.logs_of, structure)
        report = self._backend.compiled(("report", id(structure)), function, ["metrics"])
        return report(before, now)

    def logs_of(self, structure: Structure, before: list[Amount] | None, now: list[Amount]) -> Logs:
        """Make the delayed updates of metrics, and return the logs.

        Args:
            structure: facts about the step.
            before: amounts of the window before the batch, or None.
            now: amounts after it.
        """
        model = self._model
        amounts = self._backend.amounts_over_replicas([*now, *(before or ())])
        bounds = itertools.cycle(structure.bounds[1:])
        amounts = [amount.at_least(least) for amount, least in zip(amounts, bounds)]
        nothing = [Amount(0.0, 0.0, 0.0, 0.0) for _ in now]
        now, before = amounts[: len(now)], amounts[len(now) :] or nothing
        share = 1.0 / self._backend.num_replicas  # all replicas add to a metric
        for update, first, last in zip(structure.updates, before, now):
            metric = update.metric
            is_mean = isinstance(metric, keras.metrics.Mean)
            if is_mean:  # a metric reset within the window lacks its earlier part
                is_reset = copy_of(metric.count) == 0
                first = Amount._make(_numbers.where(is_reset, 0.0, a) for a in first)
            (total, count), (earlier_total, earlier_count) = update.added(last), update.added(first)
            metric.total.assign_add(ops.cast((total - earlier_total) * share, metric.total.dtype))
            if is_mean:
                added = (count - earlier_count) * share
                metric.count.assign_add(ops.cast(added, metric.count.dtype))
        if structure.logs_of_metrics is None:
            return model.get_metrics_result()
        results = {}
        for name, metric, key in structure.logs_of_metrics:
            result = metric.result()
            results[name] = result if key is None else result[key]
        own = zip(structure.own_logs, now[len(structure.updates) :])
        return nested_logs({**results, **{name: amount.value() for name, amount in own}})

    # Updates.

    def measure(self, structure: Structure, noise: GradientNoise, sums: Sums) -> None:
        """Add a window to the noise averages.

        Args:
            structure: facts about the step.
            noise: the averages.
            sums: sums of the window.
        """
        measure = self._backend.compiled(
            ("measure", id(structure)), functools.partial(self._measure, structure), ["optimizer"]
        )
        gradients = [self._joined(g, sums.unit) for g in sums.gradients]
        sums = sums._replace(amounts=[], moments=[], gradients=gradients)
        before = [noise.of(applied.optimizer) for applied in structure.applied]
        averages, *_ = self._backend.per_replica(measure(before, noise.decay, sums))  # equal on all
        for applied, after in zip(structure.applied, averages):
            noise.set(applied.optimizer, after)

    def _measure(
        self, structure: Structure, before: list[Tensor], decay: Scalar, sums: Sums
    ) -> list[Tensor]:
        after = []
        total = _numbers.where(sums.total == 0, 1.0, sums.total)
        weight = sums.total * sums.unit * self._backend.num_replicas
        gradients, divisor = self._backend.gradients_over_replicas(sums.gradients, total)
        parts = zip(before, sums.squares, by_optimizer(structure.applied, gradients))
        variables_of_each = (applied.variables for applied in structure.applied)
        for (earlier, squares, (gradients, scale)), variables in zip(parts, variables_of_each):
            norm = squared_norm(gradients, variables, scale) / divisor**2
            squares = squares._replace(total=squares.total * sums.unit)
            after.append(averaged(earlier, decay, squares, weight, norm))
        return after

    def update(self, structure: Structure, sums: Sums, counters: Counters) -> Counters:
        """Make the update of a window.

        Args:
            structure: facts about the step.
            sums: sums of the window, consumed by the update.
            counters: counters of the windows before.

        Returns:
            The counters after this window.
        """
        update = self._backend.compiled(
            ("update", id(structure)),  # the structure is kept, so its id stays unique
            functools.partial(self._update, structure),
            ["trainable", "non_trainable", "optimizer"],
            updates=["trainable", "optimizer"],
        )
        gradients = [self._joined(g, sums.unit, sums.total) for g in sums.gradients]
        others = sums._replace(gradients=[], amounts=[], squares=())
        counted: Counters = update(gradients, others, counters)
        return counted

    def _joined(self, gradient: Gradient, unit: Scalar, total: Scalar | None = None) -> Gradient:
        """Return a gradient of a window; for a sparse one, all of its rows as by `joined`."""
        return self._backend.joined(gradient, unit, total) if is_list(gradient) else gradient

    def bounded(self, structure: Structure, sums: Sums) -> Sums:
        """Return the sums of a window with a bounded total. Keras divides losses by replicas."""
        if not structure.bounds[0]:
            return sums
        least = structure.bounds[0] / self._backend.num_replicas
        bound = self._backend.compiled(("bound", least), lambda sums: sums.at_least(least), [])
        bounded: Sums = bound(sums._replace(gradients=[], amounts=[]))
        return bounded._replace(gradients=sums.gradients, amounts=sums.amounts)

    def _update(
        self, structure: Structure, sums: list[Gradient], others: Sums, counters: Counters
    ) -> Counters:
        variables = [v for a in structure.applied for v in a.variables]
        gradients = iter(others._replace(gradients=sums).mean(variables))
        with self._checking():
            for applied in structure.applied:
                self._backend.apply(applied, [next(gradients) for _ in applied.variables])
        for call, moments in zip(structure.calls, others.moments):
            call.move(moments)
        self._backend.once(self._model.on_update)
        has_zero_division = others.has_zero_division
        if others.total is not None:
            has_zero_division = has_zero_division & (others.total != 0)
        zero_division, uneven = (
            ops.cast(flag, "int32") for flag in (has_zero_division, others.is_uneven)
        )
        return count(others, counters)._replace(
            zero_division=counters.zero_division + zero_division, uneven=counters.uneven + uneven
        )

    @functools.cached_property
    def overwrites(self) -> bool:
        """Whether a "gradient" overwrites a variable, such as the scale of a float8 layer."""
        return any(map(overwrites, self._model.variables))

    def check_scale(self, structure: Structure, sums: Sums) -> None:
        """Warn if gradients that overwrite variables have another scale than on the full batch."""
        if not self.overwrites:
            return
        paths = [v.path for a in structure.applied for v in a.variables if overwrites(v)]
        for replica_sums in self._backend.per_replica(sums) if paths else ():
            total = 1.0 if replica_sums.total is None else float(replica_sums.total)
            if total and abs(total - 1.0) > 1e-6:
                self._model._warn_once(messages.rescaled_message(paths))

    @functools.cached_property
    def scaled_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers that scale losses until gradients overflow."""
        return [o for o in self._backend.optimizers() if hasattr(o, "dynamic_scale")]

    def _checking(self) -> AbstractContextManager[None]:
        """Return a context in which overflow in float16 is detected as on the full batch.

        Gradients of microbatches are smaller, and summed in float32, so they may not overflow.
        """
        return self._checks.of(self.scaled_optimizers)

    @functools.cached_property
    def _float16_ids(self) -> set[int]:
        """The ids of the variables that layers read in float16."""
        return {id(v) for layer in layers_in(self._model) for v in read_in_float16(layer)}

    def _as_checked(
        self,
        optimizer: keras.optimizers.Optimizer,
        check_finite: Callable[[list[Gradient]], Scalar],
    ) -> Callable[[list[Gradient]], Scalar]:
        def check(gradients: list[Gradient]) -> Scalar:
            variables = variables_to_train(optimizer)
            if len(gradients) == len(variables):
                pairs = zip(gradients, variables)
                gradients = [_in_float16(g) if id(v) in self._float16_ids else g for g, v in pairs]
            return check_finite(gradients)

        return check

    def whole(self, size: int, data: Nest) -> Logs:
        """Run the step on a full batch, with its layer calls split, and return its logs."""
        function = functools.partial(self._whole, size)
        run = self._backend.compiled(("whole", size), function, [], updates=GROUPS)
        return run(self._backend.as_traced(data))

    def _whole(self, size: int, data: Nest) -> Logs:
        with splitting_calls(self._model, self._backend, data, size), self._checking():
            logs, _ = self._backend.run_step(data)
        self._backend.once(self._model.on_update)
        return logs


def _in_float16(gradient: Gradient) -> Gradient:
    if gradient is None or hasattr(gradient, "dense_shape"):  # sparse gradients are not summed
        return gradient
    return ops.cast(gradient, "float16")


def count(sums: Sums, counters: Counters) -> Counters:
    """Return counters with the skipped microbatches of a window added."""
    return counters._replace(skipped=counters.skipped + sums.num_skipped)
