"""One call of `train_step`: a batch forward and backward, then the use of its sum.

A batch is one microbatch, or with `microbatch_size` several (`_passes`). Under XLA the update is
not in the function that computes their gradients: with the conditional update in the cluster, XLA
would copy all weights and optimizer state at every microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ga_model.batch._passes import Passes, calls_by_microbatches
from ga_model.batch._window import Window
from ga_model.graphs._microbatch import Batch
from ga_model.hearing._models import is_of_keras
from ga_model.recording._recorder import Target
from ga_model.replicas import _optimizers, _strategy
from ga_model.sums._sums import GradientSum


def run(
    model: Any,
    train_step: Callable[[Any], Any],
    data: Any,
    window: Window | None,
    note_sums: Callable[[list[Any]], Any] | None = None,
) -> Any:
    """Run a model's own `train_step` on a batch, and make the update if it is due.

    Args:
        model: an `AccumulatingModel`.
        train_step: takes the data of a microbatch and returns logs.
        data: the batch, as Keras passes it.
        window: the window that the batch is a part of, or None where it makes an update by itself.
        note_sums: function of all tensors that the microbatches gave, which returns one. The
            window, the optimizers and the logs wait for it.

    Returns:
        The logs of the batch.
    """
    accumulation = model._accumulation
    is_whole, adds_up = accumulation.splits_calls(), accumulation.must_add_up()
    batch = Batch(data, accumulation.size, is_whole, not is_whole, adds_up)
    accumulation.note_rows(batch)
    if accumulation.is_automatic and accumulation.automatic_size.has_any_rows:
        batch.forget_rows()
    is_heard = window is not None or model.skip_nonfinite or is_of_keras(model, "train_step")
    if is_whole and not is_heard:
        return _run_unheard(model, train_step, batch, note_sums)
    passes = Passes(model, train_step, batch, window)
    part = passes.sum_over_microbatches()
    # Nothing but the data orders these state changes after the fetch of the data: without the
    # dependency some of them run before a step finds that its iterator is at an end. What XLA
    # compiles is one node, and waits for its data.
    tensors = [t for t in tf.nest.flatten(data, expand_composites=True) if t is not None]
    tensors.append(batch.num_microbatches)  # which has waited for the check of the rows
    if note_sums is not None:
        given = [[s.values() for s in part.sums], part.logged, part.last]
        leaves = tf.nest.flatten(given, expand_composites=True)
        tensors.append(note_sums([leaf for leaf in leaves if tf.is_tensor(leaf)]))
    with tf.control_dependencies(tensors):
        logs = part.last
        if passes.logs is not None:
            add_to_window = None if window is None else window.add_logs
            counts = batch.static_rows, part.num_counted
            logs = passes.logs.finish(part.logged, part.last, *counts, add_to_window)
        if window is None:
            num_counted = part.num_counted if model.skip_nonfinite else None
            for target, gradients in [] if passes.are_applied else zip(passes.targets, part.sums):
                _apply(target, gradients, num_counted, model)
            passes.move_statistics(part)
            is_update = True if num_counted is None else tf.greater(num_counted, 0)
            _strategy.run_once_if(is_update, model._on_update)
            if part.lost:
                has_weight = tf.reduce_any([tf.not_equal(s.total, 0.0) for s in part.sums])
                accumulation.note_lost(has_weight & tf.reduce_any(part.lost))
        else:
            if part.lost:
                window.note_lost(tf.reduce_any(part.lost))
            window.note_rows(part.row_counts)
            window.add_statistics(passes.statistics, part.moments)
            passes.add_to_window(part)
            window.logs.count(part.num_counted)
            window.end_batch(accumulation.measured_noise)
        if model.skip_nonfinite:
            accumulation.count_skipped(batch.num_microbatches - part.num_counted)
    return logs


def _run_unheard(
    model: Any,
    train_step: Callable[[Any], Any],
    batch: Batch,
    note_sums: Callable[[list[Any]], Any] | None,
) -> Any:
    """Run a step of the user's own on a full batch, whatever it does, with calls by microbatches.

    When its updates begin is not known, so `note_sums` is told before.
    """
    waits_for = [] if note_sums is None else [note_sums([batch.num_microbatches])]
    with tf.control_dependencies(waits_for), calls_by_microbatches(model, batch):
        logs = train_step(batch.data)
    _strategy.run_once_if(True, model._on_update)
    return logs


def _apply(target: Target, part: GradientSum, num_counted: Any | None, model: Any) -> None:
    """Update with the gradients of a batch. They are zero where it has no weight, as Keras's.

    Args:
        target: what to update.
        part: the gradients.
        num_counted: int64 scalar tensor, microbatches that were not left out: there is no update
            if none is. Or None, where all count.
        model: the model.
    """
    noise = model._accumulation.measured_noise
    estimate = None if noise is None else noise.of(target.optimizer)

    def apply(share: GradientSum) -> None:
        gradients = share.mean(target.variables, target.least)
        _optimizers.apply(target.optimizer, gradients, target.variables, target.in_pairs)

    def update(part: GradientSum) -> None:
        share = part.of_replica(target.variables).or_zero()
        if estimate is not None:
            estimate.update(part, share, target.optimizer)
        function = _optimizers.compiled(apply) if model.jit_compile else apply
        function(share)

    if num_counted is None:
        update(part)
    else:
        _strategy.update_if(True, tf.cast(num_counted, tf.float64), update, part)
