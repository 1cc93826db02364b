"""The engine for TensorFlow: what the first level needs from a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from ga_model.backends.hooks import CoreHooks
from ga_model.backends.tensorflow import workers
from ga_model.backends.tensorflow.adapter import TensorFlowBackend
from ga_model.core.driver import Driver


class Accumulation(Driver):
    """The driver on TensorFlow."""

    backend_type = TensorFlowBackend
    backend: TensorFlowBackend

    def begin_epoch(self, epoch: int, is_first: bool) -> None:
        if is_first:
            workers.check_same_epoch(self._model.distribute_strategy, epoch)

    def explain(self, error: BaseException) -> None:
        workers.explain(error, self._model.distribute_strategy)


class Hooks(CoreHooks):
    """What a model answers that Keras asks it on TensorFlow."""

    def _train(self, iterator: Any) -> Any:
        accumulation = self._accumulation
        accumulation.backend.knows_number = _knows_number(iterator)
        logs = accumulation.train(_without_optionals(iterator), self.steps_per_execution)
        return accumulation.backend.logs_of(logs)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if not self._accumulation.is_plain():
            self._accumulation.backend.check()
        keras_builds = super()._maybe_symbolic_build
        workers.build(keras_builds, self.distribute_strategy, iterator, data_batch)

    def _make_function(self, step_function: Any) -> Any:
        step = workers.with_logs_that_reduce(step_function, self.distribute_strategy)
        return super()._make_function(step)


def _knows_number(iterator: Any) -> bool:
    """Return whether a source of data tells how many samples each of its batches has."""
    if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
        return True
    shapes = [getattr(spec, "shape", None) for spec in keras.tree.flatten(iterator.element_spec)]
    return all(shape.rank is not None and None not in shape[:1] for shape in shapes if shape)


def _without_optionals(batches: Iterator[Any]) -> Iterator[Any]:
    """Return batches with None where a dataset has nothing."""

    def tensor_or_none(leaf: Any) -> Any:
        return None if isinstance(leaf, tf.experimental.Optional) else leaf

    specs = keras.tree.flatten(getattr(batches, "element_spec", tf.OptionalSpec(None)))
    if not any(isinstance(spec, tf.OptionalSpec) for spec in specs):
        return batches
    return (keras.tree.map_structure(tensor_or_none, data) for data in batches)
