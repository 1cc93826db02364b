"""The engine for TensorFlow: what the first level needs from a backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ga_model._accumulation import Accumulation
from ga_model._train_function import switching
from ga_model.hearing._models import current_recording
from ga_model.replicas import _strategy, _workers

if TYPE_CHECKING:  # what `super()` finds
    from keras import Model as _Base
else:
    _Base = object

__all__ = ["Accumulation", "Hooks", "check_same_epoch", "explain"]


class Hooks(_Base):
    """What a model answers that Keras asks it on TensorFlow."""

    train_function: Any
    jit_compile: Any

    def _check_compile_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Do nothing: the model can be compiled with all that Keras takes."""

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        total = super()._aggregate_additional_loss(loss)
        if (recording := current_recording(self)) is not None:
            is_sum = recording.losses.is_sum(loss)
            total = _strategy.exactly_scaled(total, is_sum)
            recording.losses.note_additional(total, is_sum)
        return total

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if not self._accumulation.is_plain():
            self._accumulation.check_strategy()
        keras_builds = super()._maybe_symbolic_build
        _workers.build(keras_builds, self.distribute_strategy, iterator, data_batch)

    def _make_function(self, step_function: Any) -> Any:
        step = _workers.with_logs_that_reduce(step_function, self.distribute_strategy)
        return super()._make_function(step)

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function that `fit` calls once per execution.

        There is one for every way to train that comes up, traced when it is used for the first
        time: Keras's own for plain training, and one for each combination of settings.
        Of all but the first XLA compiles parts only (see `_step`), so the outer function is made
        without.
        """
        if self.train_function is None or force:
            self.train_function = switching(self, self._make_function_of_keras)
        return self.train_function

    def _make_function_of_keras(self) -> Any:
        self._accumulation.check_step()
        train_function, jit_compile = self.train_function, self.jit_compile
        if not self._accumulation.is_plain():
            self.jit_compile = False
        try:
            super().make_train_function(force=True)
            return self.train_function
        finally:
            self.train_function, self.jit_compile = train_function, jit_compile


def check_same_epoch(model: Any, epoch: int) -> None:
    """Raise if several workers begin with different epochs."""
    _workers.check_same_epoch(model.distribute_strategy, epoch)


def explain(error: BaseException, model: Any) -> None:
    """Add to an error of `fit` what is known of its cause."""
    _workers.explain(error, model.distribute_strategy)
