"""Run on the CPU: memory of a GPU is not the process's, and its work is not awaited."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let Keras make variables and compute on the CPU, in a process that has used no other."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        yield
    else:
        with keras.device("cpu"):
            yield
