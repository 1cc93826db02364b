"""Attributes that a model offers Keras on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ga_model.hearing._models import current_recording

if TYPE_CHECKING:  # what `super()` finds
    from keras import Model as _Base
else:
    _Base = object


class Hooks(_Base):
    """What a model answers that Keras asks it on TensorFlow."""

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


def _switching(model: Any, of_keras: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a train function that is Keras's where nothing is accumulated."""

    def run(iterator: Any) -> Any:
        accumulation = model._accumulation
        accumulation.check_step()
        if accumulation.is_plain():
            return of_keras(iterator)
        accumulation.backend.knows_samples = _knows_samples(iterator)
        return accumulation.train(_without_optionals(iterator), model.steps_per_execution)

    return run


def _knows_samples(iterator: Any) -> bool:
    """Return whether a source of data tells how many samples each of its batches has."""
    if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
        return True
    shapes = [getattr(spec, "shape", None) for spec in keras.tree.flatten(iterator.element_spec)]
    return all(shape.rank is not None and None not in shape[:1] for shape in shapes if shape)


def _without_optionals(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches with None where a dataset has nothing."""
    for data in batches:
        yield keras.tree.map_structure(
            lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
        )
