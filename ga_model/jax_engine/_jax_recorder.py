"""Record the gradients and the loss of an unchanged `train_step` while it is traced.

As on TensorFlow (`recording/_recorder.py`): attributes of the model answer with stand-ins. Weights
and numbers are noted where losses are computed, inside of what JAX differentiates, from where
tracers must not escape: `stop_gradient` gives those of the trace outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from ga_model.base import _numbers, _validate
from ga_model.base._internals import loss_tracker
from ga_model.hearing import _messages
from ga_model.hearing._compiled_copy import copy_with
from ga_model.hearing._metric_calls import MetricCalls, waiting
from ga_model.hearing._models import recording_of_thread
from ga_model.hearing._stand_ins import OptimizerStandIn, stand_in
from ga_model.jax_engine._jax_terms import Position, StepLosses, observer_of
from ga_model.jax_engine._jax_window import Amount


class Update(NamedTuple):
    """The update of a metric by the number of a batch.

    Attributes:
        metric: the metric.
        is_sum: whether what it counts is summed over microbatches. Else it counts once per window.
        weight: what it counts then.
    """

    metric: Any
    is_sum: bool
    weight: float

    def added(self, amount: Amount) -> tuple[Any, Any]:
        """Return what an amount adds to the metric: to its total, and to its count."""
        count = amount.count if self.is_sum else self.weight * jnp.minimum(amount.num_added, 1)
        return amount.value() * count, count


class Recording:
    """What one `train_step` applies and logs.

    Args:
        model: the model that is recorded.
        data: the microbatch, as `train_step` gets it.
        position: where it stands in its window.

    Attributes:
        gradients: of the trainable variables, once the step has applied its optimizer.
        relative_weight: scalar, what the microbatch counts, in `unit`, or None: it is a sum.
        unit: scalar, what weights are counted in now.
        losses: what is known of the step's losses.
    """

    def __init__(self, model: Any, data: Any, position: Position) -> None:
        self.model = model
        self.gradients: list[Any] | None = None
        self.relative_weight: Any = None
        self.unit: Any = position.unit
        self.losses = StepLosses(model, data, position)
        self._position = position
        self._metrics = _Calls()
        self._kinds: dict[int, Any] = {}  # of numbers that wait, by their place
        self._loss: tuple[Any, Any] | None = None  # numerator and denominator

    def stand_in(self, value: Any) -> Any:
        """Return what stands in for an attribute's value: optimizers and metrics."""
        return stand_in(value, self, self._metrics, _OptimizerStandIn)

    def observed_loss(self, compiled: Any) -> Any:
        """Return a copy of the compiled loss that notes its terms."""
        return copy_with(
            compiled,
            lambda entry, copy: observer_of(entry, copy, self.losses),
            self.losses.note_term,
            self._metrics,
        )

    def scale_loss(self, optimizer: Any, loss: Any) -> Any:
        """Fold the microbatch's weight into the loss, then scale it as the optimizer does."""
        terms, position = self.losses.terms(), self._position
        relative = None
        if terms.weight is None:
            self.unit = jnp.ones_like(position.unit)
        else:
            weight = jax.lax.stop_gradient(_numbers.float64(terms.weight))
            self.unit = jnp.maximum(position.unit, jnp.abs(weight * position.parts))
            is_any = self.unit != 0
            relative = jnp.where(is_any, weight / jnp.where(is_any, self.unit, 1), 0)
        self.relative_weight = relative
        counted = None if relative is None else weight
        wide = jax.lax.stop_gradient(_numbers.float64(loss))
        numerator = jax.lax.stop_gradient(terms.fold(wide, counted, position.is_first))
        if counted is None:
            self._loss = numerator, _numbers.float64(position.is_first)
        else:  # what has no weight may be NaN, and is left out
            self._loss = jnp.where(counted == 0, 0, numerator), counted
        return optimizer.scale_loss(terms.fold(loss, relative, position.is_first))

    def stateless_apply(
        self, optimizer: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """Keep the gradients of an `optimizer.stateless_apply`, which then changes nothing."""
        if self.gradients is not None:
            raise RuntimeError(_messages.applied_twice_message(self.model.name, optimizer.name))
        _validate.check_single_accumulation([optimizer], self.model.accumulation_steps)
        self.gradients = list(grads)
        return trainable_variables, optimizer_variables

    def note_kinds(self, kinds: list[Any]) -> None:
        """Note what the next numbers that wait are to the samples, as `kinds_of` returns it."""
        begin = len(self._metrics.updates)
        self._kinds.update(enumerate(kinds, begin))

    def amounts(self) -> tuple[list[Update], list[Amount]]:
        """Return the updates of metrics that wait for the full batch, and what is added to them."""
        updates, amounts = [], []
        rows = self.losses.num_rows()
        for place, call in enumerate(self._metrics.updates_by_key().values()):
            metric, _, weight, term = call
            is_tracker = metric is loss_tracker(self.model)
            is_rows = term is not None or (is_tracker and weight is not None)
            is_sum = is_rows or (weight is not None and not keras.ops.is_tensor(weight))
            count = rows if is_rows else 1.0 if weight is None else weight
            updates.append(Update(metric, is_sum, 1.0 if is_sum else float(count)))
            numerator, denominator = self._mean_of(call, is_tracker, self._kinds.get(place))
            as_scalar = _numbers.float64
            amounts.append(
                Amount(as_scalar(numerator), as_scalar(denominator), as_scalar(count), jnp.int32(1))
            )
        return updates, amounts

    def _mean_of(self, call: Any, is_tracker: bool, kind: Any) -> tuple[Any, Any]:
        """Return what a number counts in the mean over a window: numerator and denominator."""
        if is_tracker and self._loss is not None:
            return self._loss
        value, is_first = call.value, self._position.is_first
        weight: Any = self.losses.num_rows() if call.term is None else call.term.weight
        if weight is None or kind == "sum":
            return value, is_first
        return jnp.where(weight == 0, 0, value * _numbers.like(value, weight)), weight


class _OptimizerStandIn(OptimizerStandIn):
    """Stands in for the optimizer while a step is traced."""

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> Any:
        return self._listener.stateless_apply(
            self._original, optimizer_variables, grads, trainable_variables
        )


class _Calls(MetricCalls):
    """Notes numbers that are computed inside of what JAX differentiates."""

    def update(self, metric: Any, value: Any, sample_weight: Any, term: Any = None) -> None:
        super().update(metric, jax.lax.stop_gradient(value), sample_weight, term)


@contextlib.contextmanager
def record(model: Any, data: Any, position: Position) -> Iterator[Recording]:
    """Record the step of `model` that this thread traces.

    Args:
        model, data, position: as `Recording` takes them.
    """
    recording = Recording(model, data, position)
    with recording_of_thread.set(recording), waiting(recording._metrics):
        yield recording
