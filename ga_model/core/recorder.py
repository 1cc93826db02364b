"""Record the gradients and the loss of an unchanged `train_step`.

Methods of optimizers are replaced while a step is recorded. Weights and numbers are
noted where losses are computed, which on JAX is inside of what it differentiates, from where
tracers must not escape: `stop_gradient` gives those of the trace outside.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from ga_model.base import _numbers, _validate
from ga_model.base._identity import is_in, unique
from ga_model.base._internals import copy_of, loss_tracker, overwrites, unscaled_for_replicas
from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.backend_types import Applied
from ga_model.core.losses import Kinds, Position, StepLosses
from ga_model.core.metric_calls import MetricCalls, give, noting_results, waiting
from ga_model.core.models import instances_in, recording_of_thread, unrecorded
from ga_model.core.of_user import parts_of
from ga_model.core.stand_ins import observed_loss
from ga_model.core.window import Amount, Largest, shrinkage, with_values


class CannotAccumulateError(RuntimeError):
    """A step that cannot be accumulated, whatever its samples are."""


class Update(NamedTuple):
    """The update of a metric by the number of a batch.

    Attributes:
        metric: the metric.
        is_sum: whether what it counts is summed over microbatches. Else it counts as one per
            window.
    """

    metric: Any
    is_sum: bool

    def added(self, amount: Amount) -> tuple[Any, Any]:
        """Return the increments of the metric's total and count."""
        count = amount.count
        if not self.is_sum:
            count = _numbers.like(amount.value(), amount.num_added > 0)
        return amount.value() * count, count


def by_optimizer(
    applied: Sequence[Applied], gradients: list[Any]
) -> Iterator[tuple[list[Any], Any]]:
    """Yield the gradients of each optimizer, and what it scales losses by."""
    left = iter(gradients)
    for optimizer, variables, _ in applied:
        yield [next(left) for _ in variables], optimizer.scale_loss(ops.ones(()))


class Recording:
    """What one `train_step` applies and logs.

    Args:
        model: the model that is recorded.
        data: the microbatch, as `train_step` gets it.
        position: where it stands in its window.
        is_own: whether the step, or its loss, is the user's own. Then nothing is folded into the
            loss, and what the microbatch weighs is found out later.
        moves_by: scalar, how much of their norm weights are moved by the surrogate update where a
            step is tried, 0.0 in a part of a window, or None.
        waits: whether numbers that metrics get wait for the full batch, and are not only noted.
        kinds: as `StepLosses` takes them.
        is_trial: whether there is to be no update: optimizers may be applied in any way.

    Attributes:
        applied: the optimizers that the step has applied, in their order.
        gradients: of all their variables, tensors or None.
        rates: of surrogate updates, scalars, if weights were moved.
        at_updates: in a trial, the scalars of these optimizers, such as rates, and their values
            when they were applied.
        relative_weight: scalar, what the microbatch counts, in `unit`, or None: it is a sum.
        unit: scalar, what weights are counted in now.
        losses: what is known of the step's losses.
        sums: what the backward pass adds gradients to, or None.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        position: Position,
        backend: Backend,
        is_own: bool = False,
        moves_by: Any = None,
        waits: bool = True,
        kinds: Kinds | None = None,
        is_trial: bool = False,
    ) -> None:
        self.model = model
        self.moves_by = moves_by
        self.rates: list[Any] = []
        self.applied: list[Applied] = []
        self.gradients: list[Any] = []
        self.at_updates: list[tuple[Any, Any]] = []
        self.relative_weight: Any = None
        self.unit: Any = position.unit
        self.losses = StepLosses(model, backend, data, position, kinds)
        self.backend = backend
        self._is_own = is_own
        self._is_trial = is_trial
        self._position, self.sums = position, position.sums
        self._metrics = MetricCalls(waits, backend.unnoted)
        self._divided: list[Any] = []  # optimizers whose losses were
        self._copies: list[Any] = []  # of compiled losses
        self._loss: tuple[Any, Any] | None = None  # numerator and denominator

    def observed_loss(self, compiled: Any) -> Any:
        """Return a copy of the compiled loss that notes its terms."""
        copy = observed_loss(compiled, self.losses, self._metrics)
        self._copies.append(copy)
        return copy

    def release(self) -> None:
        """Let go of all tensors: the classes of copied losses, which hold what was noted, are kept
        until garbage is collected.
        """
        for copy in self._copies:
            vars(copy)["_terms"] = []
        self.gradients, self._copies, self._loss = [], [], None
        self._metrics.updates, self._metrics.results, self._metrics.terms = [], [], {}
        self.losses.release()

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Fold the microbatch's weight into the loss, then scale it, as `_scale_loss` has it."""
        with self.backend.unnoted(), unrecorded():
            return self._scale_loss(optimizer, loss)

    def _scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Fold the microbatch's weight into the loss, then scale it as the optimizer does.

        In half precision a loss of the user's own is divided by the number of microbatches, so that
        gradients overflow where those of the full batch do. `apply` takes it back.
        """
        if self._is_own and hasattr(optimizer, "dynamic_scale"):
            self._divided.append(optimizer)
            return optimizer.scale_loss(loss / _numbers.like(loss, self._position.parts))
        if self._is_own or (self.moves_by is not None and self.losses.terms().is_plain):
            return optimizer.scale_loss(loss)
        terms, position = self.losses.terms(), self._position
        if terms.regularization and self.backend.num_processes > 1:
            raise ValueError(messages.sum_with_regularizers_message(self.model.name))
        relative = weight = None
        if terms.weight is None:
            self.unit = _numbers.float64(1.0)
        else:
            weight = _numbers.constant(_numbers.float64(terms.weight))
            self.unit, relative = position.in_unit(weight)
        self.relative_weight = relative
        if self.sums is not None:
            counts = relative is None or relative != 0
            self.sums.begin(shrinkage(position.unit, self.unit), counts)
        wide = _numbers.constant(_numbers.float64(unscaled_for_replicas(loss)))
        numerator = _numbers.constant(terms.fold(wide, weight, position.is_first))
        if weight is None:
            self._loss = numerator, _numbers.float64(position.is_first)
        else:  # what has no weight may be NaN, and is left out
            self._loss = _numbers.where(weight == 0, 0.0, numerator), weight
        return optimizer.scale_loss(terms.fold(loss, relative, position.is_first))

    def apply(self, applied: Applied, gradients: Sequence[Any], values: Any = None) -> None:
        """Keep the gradients that an optimizer would apply.

        Args:
            gradients: of the variables, tensors or None.
            values: of the optimizer's variables, or None: as they are.

        Raises:
            RuntimeError: it was applied before, or another one was, and the backend has one only.
        """
        if self._is_trial and self.applied:
            return
        optimizer, variables, _ = applied
        is_again = any(optimizer is other.optimizer for other in self.applied)
        if is_again or (self.applied and not self.backend.has_several_optimizers):
            message = messages.applied_twice_message(self.model.name, optimizer.name)
            raise CannotAccumulateError(message)
        _validate.check_single_accumulation([optimizer], self.model.accumulation_steps)
        if self.moves_by is not None:
            of_optimizer = optimizer.variables
            pairs = zip(of_optimizer, values or [None] * len(of_optimizer))
            scalars = [(v, value) for v, value in pairs if len(v.shape) == 0]
            self.at_updates += [(v, copy_of(v) if x is None else x) for v, x in scalars]
        if is_in(optimizer, self._divided):
            with self.backend.unnoted():
                gradients = [with_values(g, self._times_parts) for g in gradients]
        self.applied.append(applied)
        self.gradients += [
            Largest(g) if g is not None and overwrites(v) else g
            for g, v in zip(gradients, variables)
        ]

    @property
    def is_moving(self) -> bool:
        """Whether a surrogate update is made, which may move nothing."""
        is_part = isinstance(self.moves_by, float) and self.moves_by == 0
        return self.moves_by is not None and not is_part

    def rate_of(self, gradients: Sequence[Any], weights: Sequence[Any]) -> Any:
        """Return the rate of the surrogate update of weights by gradients, a scalar, and note it.

        It is zero where gradients are, or where they are not finite.
        """
        pairs = [(g, w) for g, w in zip(gradients, weights) if g is not None]
        with self.backend.unnoted():
            norm, size = _norm([g for g, _ in pairs]), _norm([w for _, w in pairs])
            rate = self.moves_by * _numbers.share(ops.where(size == 0, 1.0, size), norm)
            rate = ops.where(ops.isfinite(rate), rate, ops.zeros_like(rate))
        self.rates.append(rate)
        return rate

    def _times_parts(self, values: Any) -> Any:
        wide = _numbers.widened(values)
        return wide * _numbers.like(wide, self._position.parts)

    def update_metrics(self) -> None:
        """Give metrics the numbers that wait."""
        for call in self._metrics.updates:
            give(call)

    @property
    def says_weight(self) -> bool:
        """Whether the compiled losses were computed, or the user's rule says what these weigh."""
        return bool(self.losses.compiled or self.model._has_rule())

    def numbers(self) -> list[Any]:
        """Return the numbers that wait for the full batch."""
        return [_numbers.float64(call.value) for call in self._metrics.updates]

    def split_logs(self, logs: Any) -> tuple[dict[str, Any], tuple[tuple[str, Any, Any], ...]]:
        """Return the numbers that a step logs itself, and the metrics whose results others are.

        Args:
            logs: what the step returns.

        Returns:
            The numbers by name, scalars or arrays; and names, metrics, and the key of their result,
            or None. Names are those of `flat_logs`.
        """
        own: dict[str, Any] = {}
        of_metrics: list[tuple[str, Any, Any]] = []
        for name, value in flat_logs(logs if isinstance(logs, dict) else {}).items():
            known = next((r for r in self._metrics.results if r[0] is value), None)
            if known is not None:
                of_metrics.append((name, *known[1:]))
            elif isinstance(value, (np.ndarray, keras.Variable)):
                own[name] = _numbers.float64(ops.convert_to_tensor(value))
            elif ops.is_tensor(value) or isinstance(value, (int, float, np.generic)):
                own[name] = _numbers.float64(value)
        return own, tuple(of_metrics)

    def updates(self) -> list[tuple[Update, Any]]:
        """Return the updates of metrics that wait for the full batch, and what each counts."""
        rows, found = self.losses.num_rows(), []
        for call in self._metrics.updates:
            metric, _, weight, term = call
            is_tracker = metric is loss_tracker(self.model)
            # Where a graph is for any number, Keras counts a batch of a term once.
            is_rows = weight is not None and (is_tracker or term is not None)
            is_sum = is_rows or weight is not None
            count = rows if is_rows else 1.0 if weight is None else weight
            found.append((Update(metric, is_sum), count))
        return found

    def means(self) -> list[tuple[Any, Any] | None]:
        """Return numerator and denominator of the mean of each number that waits.

        None of those that are of no loss.
        """
        return [self._mean_of(call) for call in self._metrics.updates]

    def _mean_of(self, call: Any) -> tuple[Any, Any] | None:
        if call.metric is loss_tracker(self.model) and self._loss is not None:
            return self._loss
        if call.term is None:
            return None
        if call.term.weight is None:
            return call.value, self._position.is_first
        weight = _numbers.float64(call.term.weight)
        return _numbers.where(weight == 0, 0.0, _numbers.float64(call.value) * weight), weight


_SMALL = 65_536  # entries of an array, of which more are not copied
_WITHIN = " within "  # between a name and that of its dict


def flat_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs without dicts in them, by names that tell these."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            flat |= {f"{key}{_WITHIN}{name}": each for key, each in flat_logs(value).items()}
        else:
            flat[name] = value
    return flat


def nested_logs(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the logs that `flat_logs` has made flat. Keras compares their names."""
    logs: dict[str, Any] = {}
    for name, value in flat.items():
        last, *others = name.split(_WITHIN)
        inner = logs
        for other in reversed(others):
            inner = inner.setdefault(other, {})
        inner[last] = value
    return logs


def _norm(arrays: Sequence[Any]) -> Any:
    """Return the norm of all numbers in arrays, whose squares may overflow: a float32 scalar."""
    numbers = [ops.ravel(ops.cast(array, "float32")) for array in arrays if 0 not in array.shape]
    small = [n for n in numbers if n.shape[0] <= _SMALL]
    if len(small) > 1:  # many operations take long to compile
        numbers = [n for n in numbers if n.shape[0] > _SMALL] + [ops.concatenate(small)]
    zero = ops.zeros((), "float32")
    largest = functools.reduce(ops.maximum, [ops.max(ops.abs(n)) for n in numbers], zero)
    unit = ops.where(largest == 0, 1.0, largest)
    return largest * ops.sqrt(sum((ops.sum(ops.square(n / unit)) for n in numbers), zero))


@contextlib.contextmanager
def record(
    model: Any, data: Any, position: Position, backend: Backend, **options: Any
) -> Iterator[Recording]:
    """Record the step of `model` that this thread runs.

    Args:
        model, data, position, backend, **options: as `Recording` takes them.
    """
    recording = Recording(model, data, position, backend, **options)
    results: Any = contextlib.nullcontext()
    if options.get("kinds") is not None or backend.traces:
        metrics = [*model.metrics, *instances_in(list(vars(model).values()), keras.metrics.Metric)]
        parts = [part for metric in metrics for part in (metric, *parts_of(metric))]
        results = noting_results.of(unique(parts))
    optimizers = backend.recording_optimizers()
    with recording_of_thread.set(recording), waiting(recording._metrics), results, optimizers:
        yield recording
