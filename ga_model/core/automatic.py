"""`microbatch_size="auto"`: sizes that are tried, and batches that are repeated.

A trial runs microbatches of a size forward and backward, holds their sums as in training, and puts
everything back. An allocation that fails is an exception between two calls. Where it would end the
process, on a CPU, memory is measured: see `automatic/_budget.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from ga_model.automatic._budget import Budget
from ga_model.core.backend import Backend


class SizeTrials:
    """Tries sizes on a batch, as `FoundSize.find` asks.

    Args:
        backend: what the model runs on.
        run: runs two microbatches of so many samples, and changes nothing.

    Attributes:
        error: the last failure, if any was not predicted.
    """

    def __init__(self, backend: Backend, run: Callable[[int], None]) -> None:
        self.error: Exception | None = None
        self._backend = backend
        self._run = run
        self._budget = Budget(backend.is_on_cpu, backend.num_bytes_of_weights)

    def fits(self, size: int) -> bool:
        """Return whether two microbatches of `size` samples go through."""
        if not self._budget.allows(size):
            self.error = None
            return False
        try:
            for _ in range(1 if self._budget.has_begun else 2):  # the first of all sets up a lot
                with self._budget.measuring(size):
                    self._run(size)
        except Exception as error:
            self.error = self._backend.out_of_memory(error)
            if self.error is None:
                raise
            return False
        is_allowed = self._budget.allowed(size)
        if not is_allowed:
            self.error = None
        return is_allowed
