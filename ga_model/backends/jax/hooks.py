"""Attributes that a model offers Keras on JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ga_model.hearing._models import current_recording

if TYPE_CHECKING:  # what `super()` finds
    from keras import Model as _Base
else:
    _Base = object


class Hooks(_Base):
    """What a model answers that Keras asks it on JAX."""

    train_function: Any
    steps_per_execution: int
    _accumulation: Any

    def _check_compile_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Do nothing: the model can be compiled with all that Keras takes."""

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        total = super()._aggregate_additional_loss(loss)
        if (recording := current_recording(self)) is not None:
            recording.losses.note_additional(loss, total)
        return total

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function that `fit` calls once per execution."""
        if self.train_function is None or force:
            super().make_train_function(force=True)
            self.train_function = _switching(self, self.train_function)
        return self.train_function


def _switching(model: Any, of_keras: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a train function that is Keras's where nothing is accumulated."""

    def run(state: Any, iterator: Any) -> Any:
        accumulation = model._accumulation
        accumulation.check_step()
        if accumulation.is_plain():
            return of_keras(state, iterator)
        number = model.steps_per_execution
        return accumulation.backend.train(state, lambda: accumulation.train(iterator, number))

    return run
