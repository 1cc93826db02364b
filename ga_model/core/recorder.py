"""Record the gradients and the loss of an unchanged `train_step`.

Methods of optimizers are patched while a step is recorded. Weights and scalars are recorded where
losses are computed. On JAX this is inside the differentiated function, from which tracers must not
escape: `stop_gradient` returns values of the outer trace.
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
from ga_model.base._internals import copy_of, loss_tracker, overwrites, unscale_for_replicas
from ga_model.base._types import Gradient, Logs, Nest, Scalar, Tensor
from ga_model.core import messages
from ga_model.core.backend import Backend
from ga_model.core.backend_types import Applied
from ga_model.core.losses import Kinds, Position, StepLosses
from ga_model.core.metric_calls import (
    MetricCall,
    MetricCalls,
    delaying_updates,
    give,
    noting_results,
)
from ga_model.core.models import instances_in, recording_of_thread, unrecorded
from ga_model.core.stand_ins import observed_loss
from ga_model.core.user_code import parts_of
from ga_model.core.window import Amount, Largest, shrinkage, with_values


class CannotAccumulateError(RuntimeError):
    """Raised for a step that cannot be accumulated on any samples."""


class Update(NamedTuple):
    """A delayed update of a metric by a scalar.

    Attributes:
        metric: the metric.
        is_sum: whether its count is summed over microbatches. Otherwise it is one per window.
    """

    metric: keras.Metric
    is_sum: bool

    def added(self, amount: Amount) -> tuple[Scalar, Scalar]:
        """Return the increments of the metric's total and count."""
        count = amount.count
        if not self.is_sum:
            count = _numbers.like(amount.value(), amount.num_added > 0)
        return amount.value() * count, count


def by_optimizer(
    applied: Sequence[Applied], gradients: list[Gradient]
) -> Iterator[tuple[list[Gradient], Scalar]]:
    """Yield the gradients of each optimizer, and its loss scale."""
    remaining = iter(gradients)
    for optimizer, variables, _ in applied:
        yield [next(remaining) for _ in variables], optimizer.scale_loss(ops.ones(()))


class Recording:
    """The gradients, losses and logs of one `train_step`.

    Args:
        model: the recorded model.
        data: the microbatch, as `train_step` gets it.
        position: its position in the window.
        is_own: whether the step or its loss is custom. Then no weight is folded into the loss;
            gradients are weighted later.
        moves_by: relative size of the surrogate update of a trial; 0.0 in a part of its
            window; None if there is no surrogate update.
        waits: whether to delay updates of metrics, instead of only recording them.
        kinds: see `StepLosses`.
        is_trial: whether no update follows, so that optimizers may be applied in any way.

    Attributes:
        applied: the optimizers that the step applied, in order.
        gradients: gradients of all their variables: tensors or None.
        rates: rates of surrogate updates.
        at_updates: in a trial, scalar variables of these optimizers, such as rates, each with its
            value when it was applied.
        relative_weight: weight of the microbatch in `unit`, or None if the loss is a sum.
        unit: that of the window's weights, with this microbatch.
        losses: the losses of the step.
        sums: sums that the backward pass adds gradients to, or None.
    """

    def __init__(
        self,
        model: keras.Model,
        data: Nest,
        position: Position,
        backend: Backend,
        is_own: bool = False,
        moves_by: Scalar = None,
        waits: bool = True,
        kinds: Kinds | None = None,
        is_trial: bool = False,
    ) -> None:
        self.model = model
        self.moves_by = moves_by
        self.rates: list[Scalar] = []
        self.applied: list[Applied] = []
        self.gradients: list[Gradient] = []
        self.at_updates: list[tuple[keras.Variable, Scalar]] = []
        self.relative_weight: Scalar = None
        self.unit: Scalar = position.unit
        self.losses = StepLosses(model, backend, data, position, kinds)
        self.backend = backend
        self._is_own = is_own
        self._is_trial = is_trial
        self._position, self.sums = position, position.sums
        self._metrics = MetricCalls(waits, backend.unnoted)
        self._divided: list[keras.optimizers.Optimizer] = []  # whose losses were divided
        self._copies: list[keras.losses.Loss] = []  # of the compiled loss
        self._loss: tuple[Scalar, Scalar] | None = None  # numerator and denominator

    def observed_loss(self, compiled: keras.losses.Loss) -> keras.losses.Loss:
        """Return a copy of the compiled loss that records its terms."""
        copy = observed_loss(compiled, self.losses, self._metrics)
        self._copies.append(copy)
        return copy

    def release(self) -> None:
        """Release all tensors: classes of copied losses hold them until garbage collection."""
        for copy in self._copies:
            vars(copy)["_terms"] = []
        self.gradients, self._copies, self._loss = [], [], None
        self._metrics.updates, self._metrics.results, self._metrics.terms = [], [], {}
        self.losses.release()

    def scale_loss(self, optimizer: keras.optimizers.Optimizer, loss: Scalar) -> Scalar:
        """Fold the microbatch's weight into the loss, then scale it as the optimizer does."""
        with self.backend.unnoted(), unrecorded():
            return self._scale_loss(optimizer, loss)

    def _scale_loss(self, optimizer: keras.optimizers.Optimizer, loss: Scalar) -> Scalar:
        """Implement `scale_loss`.

        In half precision, a custom loss is divided by the number of microbatches, so that its
        gradients overflow where those of the full batch do. `apply` multiplies them again.
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
            weight = _numbers.without_gradient(_numbers.float64(terms.weight))
            self.unit, relative = position.in_unit(weight)
        self.relative_weight = relative
        if self.sums is not None:
            counts = relative is None or relative != 0
            self.sums.begin(shrinkage(position.unit, self.unit), counts)
        wide = _numbers.without_gradient(_numbers.float64(unscale_for_replicas(loss)))
        numerator = _numbers.without_gradient(terms.fold(wide, weight, position.is_first))
        if weight is None:
            self._loss = numerator, _numbers.float64(position.is_first)
        else:  # a loss of weight zero may be NaN
            self._loss = _numbers.where(weight == 0, 0.0, numerator), weight
        return optimizer.scale_loss(terms.fold(loss, relative, position.is_first))

    def apply(
        self,
        applied: Applied,
        gradients: Sequence[Gradient],
        values: Sequence[Tensor] | None = None,
    ) -> None:
        """Record the gradients that an optimizer would apply.

        Args:
            gradients: gradients of the variables: tensors or None.
            values: values of the optimizer's variables, or None for the current ones.

        Raises:
            CannotAccumulateError: if the optimizer was applied before, or another one was and the
                backend supports only one.
        """
        if self._is_trial and self.applied:
            return
        optimizer, variables, _ = applied
        is_repeated = any(optimizer is other.optimizer for other in self.applied)
        if is_repeated or (self.applied and not self.backend.has_several_optimizers):
            message = messages.applied_twice_message(self.model.name, optimizer.name)
            raise CannotAccumulateError(message)
        _validate.check_single_accumulation([optimizer], self.model.accumulation_steps)
        if self.moves_by is not None:
            optimizer_variables = optimizer.variables
            pairs = zip(optimizer_variables, values or [None] * len(optimizer_variables))
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
        """Whether a surrogate update follows, whose rate may be zero."""
        is_part = isinstance(self.moves_by, float) and self.moves_by == 0
        return self.moves_by is not None and not is_part

    def rate_of(self, gradients: Sequence[Gradient], weights: Sequence[keras.Variable]) -> Scalar:
        """Return the rate of the surrogate update of weights by gradients, a scalar, and record it.

        It is zero if the gradients are zero or not finite.
        """
        pairs = [(g, w) for g, w in zip(gradients, weights) if g is not None]
        with self.backend.unnoted():
            norm, size = _norm([g for g, _ in pairs]), _norm([w for _, w in pairs])
            rate = self.moves_by * _numbers.divide_or_zero(ops.where(size == 0, 1.0, size), norm)
            rate = ops.where(ops.isfinite(rate), rate, ops.zeros_like(rate))
        self.rates.append(rate)
        return rate

    def _times_parts(self, values: Tensor) -> Tensor:
        wide = _numbers.widened(values)
        return wide * _numbers.like(wide, self._position.parts)

    def update_metrics(self) -> None:
        """Make the delayed updates of metrics."""
        for call in self._metrics.updates:
            give(call)

    @property
    def says_weight(self) -> bool:
        """Whether compiled losses or the user's rule determine the weight."""
        return bool(self.losses.compiled or self.model._overrides_microbatch_weight())

    def numbers(self) -> list[Scalar]:
        """Return the values of the delayed updates."""
        return [_numbers.float64(call.value) for call in self._metrics.updates]

    def split_logs(
        self, logs: Logs
    ) -> tuple[dict[str, Tensor], tuple[tuple[str, keras.Metric, str | None], ...]]:
        """Return the numbers that a step logs itself, and the logs that are results of metrics.

        Args:
            logs: the logs returned by the step.

        Returns:
            Scalars or arrays by name, and tuples of a name, a metric, and the key of its result or
            None. Names are those of `flat_logs`.
        """
        own_logs: dict[str, Tensor] = {}
        of_metrics: list[tuple[str, keras.Metric, str | None]] = []
        for name, value in flat_logs(logs if isinstance(logs, dict) else {}).items():
            result = next((r for r in self._metrics.results if r[0] is value), None)
            if result is not None:
                of_metrics.append((name, *result[1:]))
            elif isinstance(value, (np.ndarray, keras.Variable)):
                own_logs[name] = _numbers.float64(ops.convert_to_tensor(value))
            elif ops.is_tensor(value) or isinstance(value, (int, float, np.generic)):
                own_logs[name] = _numbers.float64(value)
        return own_logs, tuple(of_metrics)

    def updates(self) -> list[tuple[Update, Scalar]]:
        """Return the delayed updates of metrics, each with its count."""
        rows, updates = self.losses.num_rows(), []
        for call in self._metrics.updates:
            metric, _, weight, term = call
            is_tracker = metric is loss_tracker(self.model)
            # If a graph is for any number of samples, Keras counts a batch of a term once.
            is_rows = weight is not None and (is_tracker or term is not None)
            is_sum = is_rows or weight is not None
            count = rows if is_rows else 1.0 if weight is None else weight
            updates.append((Update(metric, is_sum), count))
        return updates

    def means(self) -> list[tuple[Scalar, Scalar] | None]:
        """Return numerator and denominator of each delayed number of a loss, None for others."""
        return [self._mean_of(call) for call in self._metrics.updates]

    def _mean_of(self, call: MetricCall) -> tuple[Scalar, Scalar] | None:
        if call.metric is loss_tracker(self.model) and self._loss is not None:
            return self._loss
        if call.term is None:
            return None
        if call.term.weight is None:
            return call.value, self._position.is_first
        weight = _numbers.float64(call.term.weight)
        return _numbers.where(weight == 0, 0.0, _numbers.float64(call.value) * weight), weight


_MAX_CONCATENATED = 65_536  # number of entries above which an array is not concatenated
_WITHIN = " within "  # between a name and the name of its dict


def flat_logs(logs: dict[str, Nest]) -> dict[str, Tensor]:
    """Return logs with nested dicts flattened into their names."""
    flat: dict[str, Tensor] = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            flat |= {f"{key}{_WITHIN}{name}": inner for key, inner in flat_logs(value).items()}
        else:
            flat[name] = value
    return flat


def nested_logs(flat: dict[str, Tensor]) -> dict[str, Nest]:
    """Invert `flat_logs`. Keras compares the names of logs."""
    logs: dict[str, Nest] = {}
    for name, value in flat.items():
        last, *outer_names = name.split(_WITHIN)
        inner = logs
        for other in reversed(outer_names):
            inner = inner.setdefault(other, {})
        inner[last] = value
    return logs


def _norm(arrays: Sequence[Tensor]) -> Scalar:
    """Return the norm of all entries of arrays, a float32 scalar, without overflow of squares."""
    numbers = [ops.ravel(ops.cast(array, "float32")) for array in arrays if 0 not in array.shape]
    small = [n for n in numbers if n.shape[0] <= _MAX_CONCATENATED]
    if len(small) > 1:  # many operations compile slowly
        numbers = [n for n in numbers if n.shape[0] > _MAX_CONCATENATED] + [ops.concatenate(small)]
    zero = ops.zeros((), "float32")
    largest = functools.reduce(ops.maximum, [ops.max(ops.abs(n)) for n in numbers], zero)
    unit = ops.where(largest == 0, 1.0, largest)
    return largest * ops.sqrt(sum((ops.sum(ops.square(n / unit)) for n in numbers), zero))


@contextlib.contextmanager
def record(
    model: keras.Model, data: Nest, position: Position, backend: Backend, **options: Any
) -> Iterator[Recording]:
    """Record the step of `model` that this thread runs.

    Args:
        model, data, position, backend, **options: see `Recording`.
    """
    recording = Recording(model, data, position, backend, **options)
    results: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if options.get("kinds") is not None or backend.traces:
        metrics = [*model.metrics, *instances_in(list(vars(model).values()), keras.metrics.Metric)]
        parts = [part for metric in metrics for part in (metric, *parts_of(metric))]
        results = noting_results.of(unique(parts))
    optimizers = backend.recording_optimizers()
    with (
        recording_of_thread.set(recording),
        delaying_updates(recording._metrics),
        results,
        optimizers,
    ):
        yield recording
