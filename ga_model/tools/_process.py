"""Run functions in separate processes, without TensorFlow's start-up messages, to measure their
peak memory. On the CPU: a process's memory excludes that of a GPU, which runs asynchronously.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext


class CommandError(Exception):
    """Raised if a command has no result. The message says why, and what to do."""


class ProcessError(CommandError):
    """Raised if a process ended without a result.

    Attributes:
        exit_code: the exit status, or minus the number of the signal that ended the process.
    """

    def __init__(self, name: str, exit_code: int, messages: str) -> None:
        if exit_code < 0:
            ending = f"was ended by {signal.Signals(-exit_code).name}"
        else:
            ending = f"ended with exit status {exit_code}"
        super().__init__(f"{name} {ending}. It wrote:\n\n{messages.rstrip()}\n")
        self.exit_code = exit_code


def in_own_process(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, computed in a new process.

    The process shares the standard output. Its standard error, mostly start-up messages of
    TensorFlow, is shown only if it fails, in a ProcessError that begins with `name`. If the
    platform can fork, processes are forked from a server that has only imported this package.
    """
    context = prepare()
    receiver, sender = context.Pipe(duplex=False)
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        messages = Path(folder, "messages")
        process = context.Process(target=_work, args=(sender, messages, function, args))
        process.start()
        sender.close()
        try:
            wait([receiver, process.sentinel])
            result = receiver.recv()
            process.join()
            return result
        except (EOFError, OSError):
            process.join()
            text = messages.read_text(errors="replace")
            raise ProcessError(name, process.exitcode or 0, text) from None
        finally:
            receiver.close()
            process.kill()
            process.join()


@functools.cache
def prepare() -> ForkServerContext | SpawnContext:
    """Return the `multiprocessing` context, and start its server.

    Call this before threads start processes: standard error is discarded while the server starts.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # inherited by all processes
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ga_model._wrap"])
    with open(os.devnull, "ab") as nowhere, errors_to(nowhere):
        process = context.Process(target=os.getpid)
        process.start()
        process.join()
    return context


def _work(
    sender: Connection, messages: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    with messages.open("ab") as stream, errors_to(stream):
        try:
            sender.send(function(*args))
        except BaseException:
            traceback.print_exc()
            raise SystemExit(1) from None


def start_tensorflow() -> None:
    """Import TensorFlow and list devices. Show TensorFlow's messages only if that fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # inherited by all processes
    with tempfile.TemporaryFile() as messages:
        try:
            with errors_to(messages):
                import tensorflow as tf

                tf.config.list_physical_devices()
        except BaseException:
            messages.seek(0)
            shutil.copyfileobj(messages, sys.stderr.buffer)
            raise


@contextlib.contextmanager
def errors_to(stream: IO[bytes]) -> Iterator[None]:
    """Redirect the standard error of this process, and of processes it starts, to a file."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Make Keras use the CPU, in a process that has not used another device yet."""
    import keras

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        yield
    else:
        with keras.device("cpu"):
            yield
