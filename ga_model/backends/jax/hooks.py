"""Attributes that a model offers Keras on JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ga_model.backends.hooks import CoreHooks


class Hooks(CoreHooks):
    """What a model answers that Keras asks it on JAX."""

    steps_per_execution: int

    def _switching(self, of_keras: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: Any, iterator: Any) -> Any:
            accumulation = self._accumulation
            accumulation.check_step()
            if accumulation.is_plain():
                return of_keras(state, iterator)
            number = self.steps_per_execution
            return accumulation.backend.train(state, lambda: accumulation.train(iterator, number))

        return run
