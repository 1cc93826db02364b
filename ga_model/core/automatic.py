"""`microbatch_size="auto"`: search for a size that fits in memory, and halve it when one fails.

A trial runs microbatches of a size forward and backward, holds their sums as training does, and
restores the model. A failed allocation is an exception between two calls. On a CPU it may end the
process, so whether a size fits is predicted there, from the memory that smaller ones took.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras

from ga_model.base import _numbers, _validate
from ga_model.base._internals import add_note
from ga_model.core.backend import Backend
from ga_model.tools import _memory

_MARGIN = 0.1  # fraction of the available memory to leave free
_SMALL = 0.02  # fraction of the available memory that is negligible


class FoundSize:
    """The microbatch size found for one model since `compile`.

    Attributes:
        size: samples per microbatch, or None before the search.
        is_whole: whether the batch of the last search fits whole.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Discard the size, so that the next batch starts a search."""
        self.size: Any = None
        self.is_whole = False
        self._rows = 0  # in the batch of the last search

    def needs_search(self, rows: int) -> bool:
        """Return whether a batch of `rows` samples requires a search."""
        return self.size is None or (self.is_whole and rows > self._rows)

    def find(self, model: keras.Model, rows: int, trials: SizeTrials) -> None:
        """Find the largest size up to `rows`, within a tenth, and print the progress.

        Raises:
            RuntimeError: if not even one sample fits.
        """
        show = functools.partial(_show, model._accumulation.is_verbose)

        def fits(size: int) -> bool:
            show(_trying_message(size), is_last=False)
            return trials.fits(size)

        size, failed = _largest(fits, rows)
        if size == 0:
            self.fail(trials.error, _no_row_message(model.name))
        self.is_whole, self._rows = failed is None, rows
        self.size = size
        show(_found_message(size, failed, trials.error is not None), is_last=True)

    def halve(self, model: keras.Model, rows: int, error: Exception) -> None:
        """Halve the size after a batch ran out of memory.

        Args:
            rows: samples of the batch.
            error: the out-of-memory error.

        Raises:
            RuntimeError: if the size is 1.

        Warns:
            UserWarning: that the size was halved.
        """
        size = min(self.size, rows)
        if size == 1:
            self.fail(error, _no_row_message(model.name))
        self.is_whole = False
        self.size = (size + 1) // 2
        _validate.warn(_halved_message(model.name, size, self.size))

    def fail(self, error: Exception | None, message: str) -> NoReturn:
        """Raise a RuntimeError caused by `error`."""
        raised = RuntimeError(message)
        add_note(raised, f"The error was: {error}")  # Keras drops the cause in `fit`
        raise raised from error


class SizeTrials:
    """Tries sizes on a batch, for `FoundSize.find`.

    On a CPU, the peak of resident memory of the next size, at most twice the last one, is
    extrapolated by a straight line through the peaks measured so far.

    Args:
        weights: the trainable variables.
        run: runs two microbatches of a size, and restores the model.

    Attributes:
        error: the last out-of-memory error, or None if the last failure was predicted.
    """

    def __init__(
        self, backend: Backend, weights: list[keras.Variable], run: Callable[[int], None]
    ) -> None:
        self.error: Exception | None = None
        self._backend = backend
        self._run = run
        self._is_measured = backend.is_on_cpu
        self._sum_bytes = sum(map(_num_bytes_of_sum, weights))  # bytes, for any size
        self._rises: dict[int, int] = {}
        self._start: int | None = None
        self._held = 0  # freed memory that the process still holds; trials use it first
        self._available: dict[int, float] = {}  # by size, measured before its trial
        self._has_begun = False

    def fits(self, size: int) -> bool:
        """Return whether two microbatches of `size` samples fit in memory."""
        is_allowed = self._allows(size)
        if is_allowed:
            try:
                for _ in range(1 if self._has_begun else 2):  # the first one sets up a lot
                    with self._measuring(size):
                        self._run(size)
            except Exception as error:
                self.error = self._backend.out_of_memory(error)
                if self.error is None:
                    raise
                return False
            # It may have used more than predicted.
            is_allowed = self._rises.get(size, 0) <= self._available.get(size, math.inf)
        if not is_allowed:
            self.error = None
        return is_allowed

    def _allows(self, size: int) -> bool:
        """Return whether a size is predicted to leave the margin of the available memory free."""
        if not self._rises:
            return True
        available = _memory.available_memory() * (1 - _MARGIN)
        taken = _memory.memory_in_use() - (self._start or 0)  # still held, for the next trial
        self._available[size] = available + taken
        predicted = self._predicted(size)
        if _memory.address_limit() is not None:
            # TensorFlow keeps its memory, and takes as much again, or all there is, if it is full.
            predicted = max(predicted, 2.0 * taken)
        return bool(predicted <= available + taken)

    def _predicted(self, size: int) -> float:
        sizes = sorted(self._rises)
        last, rise = sizes[-1], float(self._rises[sizes[-1]])
        if len(sizes) == 1:
            return rise + max(0.0, rise - self._sum_bytes) * (size - last) / last
        if self._held > _SMALL * self._available.get(size, math.inf):
            # Rises exclude the held memory, so their differences are no slopes.
            taken = max(0.0, self._held + rise - self._sum_bytes)
            return rise + taken * (size - last) / last
        slopes: list[float] = [(rise - self._rises[s]) / (last - s) for s in (sizes[0], sizes[-2])]
        return rise + max([0.0, *slopes]) * (size - last)

    @contextlib.contextmanager
    def _measuring(self, size: int) -> Iterator[None]:
        """Record the peak memory of the block as that of a size."""
        if not self._is_measured:
            yield
            return
        if self._start is None and self._has_begun:
            self._start, self._held = _memory.memory_in_use(), _memory.held_memory()
        _memory.reset_peak_memory()
        yield
        if self._start is not None:
            self._rises[size] = _memory.peak_in_use() - self._start
        self._has_begun = True


def _num_bytes_of_sum(weight: keras.Variable) -> int:
    """Return the bytes of a window's sum of gradients of one variable."""
    is_double = _numbers.sum_dtype(weight.dtype) == "float64"
    return int(math.prod(weight.shape)) * (8 if is_double else 4)


def _largest(fits: Callable[[int], bool], limit: int) -> tuple[int, int | None]:
    """Return the largest size that fits, or 0, and the smallest that does not, or None.

    Stops within a tenth of the largest size, because each trial takes time.
    """
    fitting, size = 0, 1
    while fits(size):
        fitting = size
        if size == limit:
            return size, None
        size = min(2 * size, limit)
    while size - fitting > max(1, fitting // 10):
        middle = (fitting + size) // 2
        if fits(middle):
            fitting = middle
        else:
            size = middle
    return fitting, size


def _show(is_verbose: bool, text: str, is_last: bool) -> None:
    """Print the progress of the search, on one line if a terminal or notebook can rewrite it."""
    if is_verbose and (sys.stdout.isatty() or "ipykernel" in sys.modules):
        print(f"\r{text:<78}", end="\n" if is_last else "", flush=True)
    elif is_verbose and is_last:
        print(text, flush=True)


_LESS = (
    "use a smaller model or smaller samples, compute in `mixed_float16`, or stop other programs "
    "that use the device's memory"
)


def _trying_message(size: int) -> str:
    samples = "sample" if size == 1 else "samples"
    return f'microbatch_size="auto": trying {size} {samples} per microbatch ...'


def _found_message(size: int, failed: int | None, was_tried: bool) -> str:
    """Return the message about the size that "auto" has found.

    Args:
        size: samples of the largest microbatch that fits.
        failed: samples of the smallest one that does not fit, or None.
        was_tried: whether that one was tried, not only predicted.
    """
    if failed is None:
        return f'microbatch_size="auto": the full batch of {size} samples fits'
    why = "did not fit" if was_tried else "would not fit"
    return (
        f'microbatch_size="auto": {size} {"sample" if size == 1 else "samples"} per '
        f"microbatch ({failed} {why})"
    )


def _no_row_message(model: str) -> str:
    return (
        'With `microbatch_size="auto"`, at least one sample must fit in memory. '
        f"Received: {model!r}, which runs out of memory with 1 sample. To train it, {_LESS}."
    )


def _halved_message(model: str, size: int, half: int) -> str:
    return (
        f"A batch of {model!r} no longer fits in memory with {size} samples at a time. It is "
        f"retried with {half}, and `model.microbatch_size` is {half} from now on. To search for a "
        'larger size again, set `model.microbatch_size = "auto"`.'
    )


def partly_updated_message(model: str, size: int, is_own_step: bool) -> str:
    where = "in a custom `train_step`" if is_own_step else "in the update"
    less = "set a smaller `microbatch_size`" if size > 1 else _LESS
    return (
        "A batch that runs out of memory is retried only if its update has not begun. Received: "
        f"{model!r}, out of memory {where} with {size} samples at a time; its weights may be "
        f"partly updated. Restore them from a backup or a saved model, and {less}."
    )
