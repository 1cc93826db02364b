"""The context of the running thread: a value for the duration of a block, and a graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class ThreadValue:
    """A value that a thread sets for the duration of a block, and that other threads do not see.

    Replicas of a strategy are traced in threads of their own.

    Args:
        default: what `get` returns outside all blocks.
    """

    def __init__(self, default: Any = None) -> None:
        self._default = default
        self._local = threading.local()

    def get(self) -> Any:
        """Return the value of the innermost block that this thread is in."""
        return getattr(self._local, "value", self._default)

    @contextlib.contextmanager
    def set(self, value: Any) -> Iterator[None]:
        """Let `get` return `value` in a block."""
        outer = self.get()
        self._local.value = value
        try:
            yield
        finally:
            self._local.value = outer


is_unnoted = ThreadValue(False)  # whether this package computes what no scalar is noted of


def graph_being_made() -> Any:
    """Return the graph that this thread adds operations to, or None where they run at once."""
    import tensorflow as tf

    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
