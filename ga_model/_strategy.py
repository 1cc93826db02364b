"""Everything that depends on `tf.distribute`, and on names that Keras keeps private.

Private names of Keras in use, read in Keras 3.14.0 to 3.15.1:

* `Trainer._compile_loss`, `CompileLoss._flat_losses` and `tensor._keras_mask`, in `_model`,
  `_look_ahead` and `_observed_loss`: what each compiled loss averages over.
  `tests/test_weights.py`.
* `Trainer._aggregate_additional_loss`, in `_model`: the losses that layers add. The same tests.
* `Layer._flatten_layers`, in `_model`, `_recorder` and `_step`: layers at any depth.
  `tests/test_models.py`.
* `R2Score._built`, `FBetaScore._built`, in `_step`: whether they have their variables.
  `tests/test_nonfinite.py`.
* `Optimizer._trainable_variables`, in `_recorder`: `optimizer.apply(gradients)` without variables.
  `tests/test_steps.py`.
* `KerasSaveable._unpickle_model`, in `_wrap`: pickling a wrapped model as the plain model.
  `tests/test_saving.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ga_model import _validate


def check_single_replica() -> None:
    """Raise NotImplementedError under a strategy with more than one replica."""
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise NotImplementedError(
            _validate.strategy_message(type(strategy).__name__, strategy.num_replicas_in_sync)
        )


def make_variable(shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    """Make a variable of zeros outside of the graph that is being traced.

    A variable that `tf.function` sees coming into being makes it trace a second time. This one is
    made eagerly and out of its sight.
    """
    with tf.init_scope():
        return tf.Variable(
            tf.zeros(shape, dtype), trainable=False, experimental_enable_variable_lifting=False
        )


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create the optimizer's variables, as its first `apply` would.

    Done ahead of `update_if`, because variables made inside of a branch belong to that branch.
    """
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))


def run_if(condition: tf.Tensor, function: Callable[[], Any]) -> None:
    """Run `function` in the graph where `condition`, a bool scalar tensor, holds."""

    def run() -> tf.Tensor:
        function()
        return tf.constant(0)

    tf.cond(condition, run, lambda: tf.constant(0))


def update_if(condition: tf.Tensor, update: Callable[[], Any]) -> None:
    """Run `update`, which applies an optimizer, in the graph where `condition` holds.

    An optimizer synchronizes replicas, also a single one, with `merge_call`, and that is not
    allowed in a branch of the replica's own graph. So the branch stands in cross-replica context
    and calls the replicas from there (keras#20582 tells of the failure otherwise).

    Args:
        condition: bool scalar tensor.
        update: function without arguments. It must not contain another `update_if`.
    """

    def branch(strategy: tf.distribute.Strategy) -> None:
        run_if(condition, lambda: strategy.extended.call_for_each_replica(update))

    replica = tf.distribute.get_replica_context()
    if replica is None:
        branch(tf.distribute.get_strategy())
    else:
        replica.merge_call(branch)
