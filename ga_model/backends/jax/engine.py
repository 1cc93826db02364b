"""The engine for JAX: what the first level needs from a backend."""

from __future__ import annotations

from typing import Any

from ga_model.backends.hooks import CoreHooks
from ga_model.backends.jax.adapter import JaxBackend
from ga_model.core.driver import Driver


class Accumulation(Driver):
    """All that is kept for a model where Keras runs on JAX."""

    backend_type = JaxBackend
    backend: JaxBackend


class Hooks(CoreHooks):
    """What a model answers that Keras asks it on JAX."""

    def _train(self, state: Any, iterator: Any) -> Any:
        run, number = self._accumulation.train, self.steps_per_execution
        return self._accumulation.backend.train(state, lambda: run(iterator, number))
