"""Compute the denominators of loss terms in a batch before it is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ga_model.base._context import graph_being_made
from ga_model.base._internals import compiled_loss, takes_training
from ga_model.graphs._loop import loop
from ga_model.graphs._microbatch import Batch
from ga_model.hearing import _weights
from ga_model.hearing._models import computes_loss_as_keras, unpack
from ga_model.recording._logs import MetricCalls
from ga_model.recording._observed_loss import observed
from ga_model.replicas import _strategy


def look_ahead(model: Any, batch: Batch, is_window: bool) -> _weights.Whole:
    """Return what is known of a batch before its microbatches are trained on.

    For weights the microbatches run forward once more, of which TensorFlow leaves out what masks
    do not depend on. That happens once, if a microbatch asks, and where the batch is and not in the
    graph of the microbatch. Replicas then communicate.
    """
    graph = graph_being_made()

    def once(function: Callable[[], Any]) -> Callable[[], Any]:
        def result() -> Any:
            # In the batch's graph; without one, out of sight of the tape that is running.
            with tf.init_scope() if graph is None else graph.as_default():
                return _strategy.mean_over_replicas(function())

        return functools.cache(result)

    def of_microbatch(leaves: list[Any], is_first: Any) -> list[Any]:
        x, y, sample_weight = unpack(batch.pack(leaves))
        terms: list[_weights.Term] = []
        compiled = observed(compiled_loss(model), terms.append, MetricCalls(), is_first=is_first)
        with keras.StatelessScope():  # what layers would change, metrics and statistics, stays
            y_pred = model(x, training=False) if takes_training(model) else model(x)
            compiled(y, y_pred, sample_weight)
        weights = [tf.constant(0.0) if term.weight is None else term.weight for term in terms]
        return [tf.cast(weight, tf.float64) for weight in weights]

    def weights() -> list[Any]:
        function: Any = of_microbatch
        if graph is not None:
            signature = [batch.signature, tf.TensorSpec((), tf.bool)]
            function = tf.function(of_microbatch, input_signature=signature, autograph=False)

        def add(index: Any, total: list[Any]) -> list[Any]:
            part = function(batch.microbatch(index), tf.constant(False))
            return [a + b for a, b in zip(total, part)]

        first = function(batch.microbatch(tf.zeros((), tf.int64)), tf.constant(True))
        return loop(add, first, batch.num_microbatches)  # type: ignore[no-any-return]

    def weights_if_known() -> list[Any] | None:
        if not computes_loss_as_keras(model):
            return None
        return [] if compiled_loss(model) is None else weights_once()

    weights_once = once(weights)
    return _weights.Whole(
        once(lambda: tf.cast(batch.rows, tf.float64)), is_window, weights_if_known
    )
