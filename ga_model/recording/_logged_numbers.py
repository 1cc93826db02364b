"""What a number asks for that a step gives to a metric, or logs."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.hearing import _weights
from ga_model.reading._denominators import OF_WEIGHTS, by_kind
from ga_model.recording._losses import StepLosses, weight_and_factor
from ga_model.replicas import _strategy


class Mean(NamedTuple):
    """A microbatch's part of a mean.

    Attributes:
        numerator, denominator: float64 scalar tensors, to be summed over microbatches.
        least: what the sum of the denominators counts as at least.
    """

    numerator: Any
    denominator: Any
    least: float = 0.0


class LoggedNumbers:
    """Finds out what the numbers of one recorded step are over the samples.

    Args:
        model: the model that is recorded.
        losses: what is known of the step's losses.
        is_first: bool scalar tensor, whether no microbatch of the window has counted yet.
    """

    def __init__(self, model: Any, losses: StepLosses, is_first: Any) -> None:
        self._model = model
        self._losses = losses
        self._is_first = is_first

    def mean_of(self, value: Any, metric: Any, term: Any, is_loss: bool) -> Mean:
        """Return what a scalar counts in the mean over the microbatches of a window.

        Args:
            value: scalar tensor, of this microbatch.
            metric: what it is for, if it is a metric's.
            term: the loss term that it is the value of, or None.
            is_loss: whether it is a loss that the step has passed on to an optimizer.
        """
        losses, is_total = self._losses, self._losses.is_total(metric)
        is_loss = is_loss or is_total
        is_to_read = losses.reads_step and not self._model._has_rule() if is_loss else term is None
        read = self._read(value) if is_to_read else None
        terms, factor = read or (losses.terms_of_scalar(metric, term, is_loss), None)
        # Keras tracks the total as it is on one replica, before it is divided by their number.
        replicas = float(_strategy.num_replicas()) if is_total else 1.0
        value = tf.cast(value, tf.float64) / replicas
        if terms.weight is None:
            folded = terms.fold(value, None, self._is_first) * replicas
            return Mean(folded, tf.cast(self._is_first, tf.float64))
        weight = tf.cast(terms.weight, tf.float64)
        folded = terms.fold(value, weight, self._is_first) * replicas
        folded = folded if factor is None else folded * factor
        folded = tf.where(tf.equal(weight, 0.0), tf.zeros_like(folded), folded)
        return Mean(folded, weight, terms.least)

    def is_mean_or_sum(self, value: Any) -> bool:
        """Return whether a number is read to be one mean or sum over samples."""
        return self._read(value) is not None

    def is_sum(self, value: Any) -> bool:
        """Return whether a number is read to be a sum over samples."""
        read = self._read(value)
        return read is not None and read[0].weight is None

    def _read(self, value: Any) -> tuple[_weights.LossTerms, Any] | None:
        """Return the weight that a number asks for, and what it is to be multiplied by, or None.

        Returns None if it is not read to be one mean or sum over samples.
        """
        if not tf.is_symbolic_tensor(value):
            return None
        found = by_kind(self._losses.heard.read(value, of_values=True).denominators or ())
        has_weights = found.pop(OF_WEIGHTS.kind, None) is not None
        if len(found) != 1:
            return None
        (denominator,) = found.values()
        if has_weights and (denominator.count is None or denominator.divisor is not None):
            return None
        if denominator.count is None:
            return _weights.of_weight(None), None
        return weight_and_factor(denominator, self._is_first)

    def is_count(self, sample_weight: Any) -> bool:
        """Return whether a scalar weight, or None, is a number of samples as far as is known."""
        if sample_weight is None:
            return False
        static = sample_weight
        if tf.is_tensor(sample_weight):
            static = tf.get_static_value(sample_weight)
            if static is None or self._losses.graph is None:
                return True
        return bool(static == self._losses.static_rows())

    def follows_from_samples(self, value: Any) -> bool:
        """Return whether a number may be another one for other samples."""
        if self._losses.graph is None or not tf.is_symbolic_tensor(value):
            return self._losses.graph is None
        denominators = self._losses.heard.read(value, of_values=True).denominators
        return denominators is None or bool(set(by_kind(denominators)) - {OF_WEIGHTS.kind})
