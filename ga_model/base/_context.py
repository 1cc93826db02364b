"""Thread-local values that are set for the duration of a `with` block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class ThreadValue(threading.local):
    """A value that a thread sets for a block and other threads do not see.

    It is per thread because replicas of a strategy are traced in separate threads.
    """

    def __init__(self, default: Any = None) -> None:  # runs in each thread
        self._value = default

    def get(self) -> Any:
        """Return the value of this thread's innermost block, or the default outside of blocks."""
        return self._value

    @contextlib.contextmanager
    def set(self, value: Any) -> Iterator[None]:
        """Make `get` return `value` in a block."""
        outer, self._value = self._value, value
        try:
            yield
        finally:
            self._value = outer


is_package_code = ThreadValue(False)  # whether scalars are the package's own, which `noting` skips
