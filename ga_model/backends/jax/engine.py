"""The engine for JAX: what the first level needs from a backend."""

from __future__ import annotations

from typing import Any

from ga_model.backends.hooks import CoreHooks


class Hooks(CoreHooks):
    """Methods of a model that Keras calls on JAX."""

    def _train(self, state: Any, iterator: Any) -> Any:
        run, number = self._accumulation.train, self.steps_per_execution
        return self._accumulation.backend.train(state, lambda: run(iterator, number))
