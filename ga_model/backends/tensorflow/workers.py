"""Several workers: work around gaps of Keras, and explain errors of failed workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ga_model.base._internals import add_note
from ga_model.base._internals_tf import logs_over_replicas
from ga_model.base._types import Logs, Nest, Scalar, Tensor


def build(
    keras_builds: Callable[..., None],
    strategy: tf.distribute.Strategy,
    iterator: Iterable[Any] | None,
    batch: Nest,
) -> None:
    """Build a model under its strategy from its first batch, by Keras's `_maybe_symbolic_build`.

    Keras averages the replicas' parts of the batch, although it only needs their shape. This fails
    with several workers, and if the parts have different numbers of samples (keras#20585, seen in
    3.14.0 to 3.15.1). So with several replicas Keras gets one part.
    """
    if iterator is None or strategy.num_replicas_in_sync == 1:
        keras_builds(iterator, batch)
        return
    for *_, batches in iterator:  # after the number of the step; since Keras 3.11, after two
        part = tf.nest.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], next(batches)
        )
        keras_builds(data_batch=part)
        break


def with_logs_that_reduce(
    step: Callable[[Nest], Logs], strategy: tf.distribute.Strategy
) -> Callable[[Nest], Logs]:
    """Return a `train_step` or `test_step` whose logs Keras can average over several workers.

    Keras averages over axis 0, which scalars lack (keras#20585, seen in 3.14.0 to 3.15.1). So they
    get this axis, unless a newer Keras can average a scalar.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return step

    def reduce() -> Logs:
        logs = strategy.run(lambda: tf.zeros(()))
        return logs_over_replicas(logs, strategy)

    try:
        tf.function(reduce, autograph=False).get_concrete_function()
        return step
    except ValueError:
        return functools.wraps(step)(lambda data: tf.nest.map_structure(_with_axis, step(data)))


def _with_axis(log: Scalar | None) -> Tensor | None:
    if log is None or len(getattr(log, "shape", ())) > 0:
        return log
    return tf.convert_to_tensor(log)[tf.newaxis]


def check_same_epoch(strategy: tf.distribute.Strategy, epoch: int) -> None:
    """Raise RuntimeError on every worker unless all are about to train the same epoch."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    here = tf.constant([epoch, epoch**2], tf.int64)
    total, total_of_squares = strategy.reduce("SUM", here, axis=None).numpy()
    if total**2 != total_of_squares * strategy.num_replicas_in_sync:
        raise RuntimeError(_epochs_message(epoch))


def explain(error: BaseException, strategy: tf.distribute.Strategy) -> None:
    """Add a note to an error that means that another worker has failed."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and (
        isinstance(error, tf.errors.UnavailableError) or "ollective ops is aborted" in str(error)
    ):
        add_note(error, _worker_message())


def _worker_message() -> str:
    return (
        "Another worker of this cluster is unreachable: it was stopped, or it failed with an "
        "error, which its own output shows. The others cannot continue alone. Restart all workers; "
        "with `keras.callbacks.BackupAndRestore` they continue after the last complete epoch."
    )


def _epochs_message(epoch: int) -> str:
    return (
        f"All workers must start with the same epoch. Received: epoch {epoch} here (counted from "
        "0) and a different one on another worker, probably because the last run was stopped while "
        "backups were written. Copy the backup directory of the most advanced worker to the others."
    )
