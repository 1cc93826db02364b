"""Values that the running thread has for the duration of a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class ThreadValue:
    """A value that a thread sets for the duration of a block, and that other threads do not see.

    Replicas of a strategy are traced in threads of their own. Outside all blocks, `get` returns the
    default.
    """

    def __init__(self, default: Any = None) -> None:
        self._default = default
        self._local = threading.local()

    def get(self) -> Any:
        """Return the value of the innermost block that this thread is in."""
        return getattr(self._local, "value", self._default)

    @contextlib.contextmanager
    def set(self, value: Any) -> Iterator[None]:
        """Make `get` return `value` in a block."""
        outer = self.get()
        self._local.value = value
        try:
            yield
        finally:
            self._local.value = outer


is_unnoted = ThreadValue(False)  # whether this package computes, whose scalars are not noted
