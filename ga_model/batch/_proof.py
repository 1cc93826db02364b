"""Find out whether a step of the user's own adds up over microbatches, before it is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ga_model.base._internals import is_built, layers_in
from ga_model.hearing._models import optimizers_in
from ga_model.hearing._position import Position
from ga_model.hearing._python_state import python_state
from ga_model.recording._proof import StepProof
from ga_model.recording._recorder import record


def adds_up(model: Any, train_step: Callable[[Any], Any], data: Any) -> bool:
    """Return whether a step is proved to do with the microbatches of a batch what it does with it.

    The step is drawn once, on a microbatch of any number of samples, in a graph that is given up.
    Whatever it raises there, it may not raise on the full batch.

    Args:
        model, train_step: the model, and its step.
        data: the batch.
    """
    if not all(map(is_built, layers_in(model, include_self=False))):
        return False
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    if not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank is not None for leaf in leaves):
        return False
    if len({leaf.shape[0] for leaf in leaves if leaf.shape.rank}) > 1:
        return False

    proofs: list[StepProof] = []

    def draw(leaves: list[Any]) -> None:
        remaining = iter(leaves)
        microbatch = tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(remaining), data
        )
        zero, one = tf.zeros((), tf.float64), tf.ones((), tf.float64)
        units = [(optimizer, zero) for optimizer in optimizers_in(vars(model))]
        position = Position(
            units,
            tf.ones((), tf.int64),
            num_microbatches=one,
            parts=one,
            is_first=tf.constant(True),
            whole=None,
            is_window=False,
            is_update=False,
            defers_logs=True,
            can_be_whole=True,
            must_add_up=False,
            is_trial=True,
        )
        proofs.append(proof := StepProof(model))
        with proof.listening(), record(model, microbatch, position) as recording:
            logs = train_step(microbatch)
        with proof.listening():
            proof.check(recording, logs)

    specs = [
        tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype)
        for leaf in leaves
    ]
    state = python_state(model)
    try:
        with model._accumulation.holding_back() as told:
            tf.function(draw, autograph=False).get_concrete_function(specs)
        return not told
    except Exception:
        return False
    finally:
        if not any(proof.has_created for proof in proofs):
            state.put_back()
