"""The engine for JAX: what the first level needs from a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ga_model.backends.hooks import CoreHooks
from ga_model.base._types import Logs, Nest

if TYPE_CHECKING:
    import jax


class Hooks(CoreHooks):
    """Methods of a model that Keras calls on JAX."""

    def _train(
        self, state: tuple[list[jax.Array], ...], iterator: Iterator[Nest]
    ) -> tuple[Logs, tuple[list[jax.Array], ...]]:
        run, number = self._accumulation.train, self.steps_per_execution
        return self._accumulation.backend.train(state, lambda: run(iterator, number))  # type: ignore[no-any-return]
