"""The engine for TensorFlow: what the first level needs from a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ga_model.backends.hooks import CoreHooks
from ga_model.backends.tensorflow import workers
from ga_model.base._internals_tf import elements_of
from ga_model.base._types import Logs, Nest


class Hooks(CoreHooks):
    """Methods of a model that Keras calls on TensorFlow."""

    def _train(self, iterator: Iterator[Nest]) -> Logs:
        accumulation = self._accumulation
        specs = keras.tree.flatten(getattr(iterator, "element_spec", tf.OptionalSpec(None)))
        accumulation.backend.element_specs = specs
        logs = accumulation.train(_without_optionals(iterator, specs), self.steps_per_execution)
        return accumulation.backend.logs_of(logs)

    def _maybe_symbolic_build(
        self, iterator: Iterable[Any] | None = None, data_batch: Nest = None
    ) -> None:
        if not self._accumulation.is_plain():
            self._accumulation.backend.check()
        keras_builds = super()._maybe_symbolic_build
        workers.build(keras_builds, self.distribute_strategy, iterator, data_batch)

    def _make_function(self, step_function: Callable[[Nest], Logs]) -> Callable[..., Logs]:
        step = workers.with_logs_that_reduce(step_function, self.distribute_strategy)
        return super()._make_function(step)  # type: ignore[no-any-return]


def _without_optionals(iterator: Iterator[Nest], specs: Iterable[tf.TypeSpec]) -> Iterator[Nest]:
    """Return the batches of an iterator, with None instead of empty optionals."""

    def tensor_or_none(leaf: Any) -> Any:
        return None if isinstance(leaf, tf.experimental.Optional) else leaf

    if not any(isinstance(spec, tf.OptionalSpec) for spec in specs):
        return elements_of(iterator)
    return (keras.tree.map_structure(tensor_or_none, data) for data in iterator)
