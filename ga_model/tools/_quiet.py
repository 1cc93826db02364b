"""Start TensorFlow without the lines that it writes when it starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import IO


def start_tensorflow() -> None:
    """Import TensorFlow and let it look for devices. What it says of that is shown if it fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # inherited by other processes
    with tempfile.TemporaryFile() as said:
        try:
            with errors_to(said):
                import tensorflow as tf

                tf.config.list_physical_devices()
        except BaseException:
            said.seek(0)
            shutil.copyfileobj(said, sys.stderr.buffer)
            raise


@contextlib.contextmanager
def errors_to(stream: IO[bytes]) -> Iterator[None]:
    """Write the standard error of this process, and of processes it starts, to a file."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
