"""The engine for TensorFlow: what the first level needs from a backend."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ga_model._settings import Settings
from ga_model.backends.tensorflow import workers
from ga_model.backends.tensorflow.adapter import TensorFlowBackend
from ga_model.backends.tensorflow.hooks import Hooks
from ga_model.core.driver import Driver

__all__ = ["Accumulation", "Hooks", "check_same_epoch", "explain"]


class Accumulation(Driver):
    """All that is kept for a model where Keras runs on TensorFlow.

    Args:
        model, settings: as `ModelState` takes them.
    """

    backend: TensorFlowBackend

    def __init__(self, model: Any, settings: Settings) -> None:
        super().__init__(model, settings, TensorFlowBackend(model))

    def run_step(self, train_step: Any, *args: Any) -> Any:
        is_driven = self.backend.is_running_step() or self.is_plain()
        if is_driven or not tf.executing_eagerly():
            return super().run_step(train_step, *args)
        return self.train(iter(args), 1)


def check_same_epoch(model: Any, epoch: int) -> None:
    """Raise if several workers begin with different epochs."""
    workers.check_same_epoch(model.distribute_strategy, epoch)


def explain(error: BaseException, model: Any) -> None:
    """Add to an error of `fit` what is known of its cause."""
    workers.explain(error, model.distribute_strategy)
