"""`microbatch_size="auto"`: the search for a size that fits, and batches that are repeated.

A trial runs microbatches of a size forward and backward, holds their sums as in training, and puts
everything back. An allocation that fails is an exception between two calls. Where it would end the
process, on a CPU, memory is measured, and from the sizes that were tried it is predicted whether
the next one fits.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ga_model.base import _numbers, _validate
from ga_model.base._internals import add_note
from ga_model.core.backend import Backend
from ga_model.tools import _memory

_MARGIN = 0.1  # of the available memory, which is left alone
_SMALL = 0.02  # of it, which is not looked at


class FoundSize:
    """The size that was found for one model since its `compile`.

    Attributes:
        size: samples per microbatch, or None before the size is found.
        is_whole: whether no size was found that would not fit, so that batches stay whole.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the size."""
        self.size: Any = None
        self.is_whole = False
        self._rows = 0  # of the batch that the size was found with

    def is_to_search(self, rows: int) -> bool:
        """Return whether a size has to be found for a batch of so many samples."""
        return self.size is None or (self.is_whole and rows > self._rows)

    def find(self, model: Any, rows: int, trials: SizeTrials) -> None:
        """Find the largest size up to `rows`, within a tenth, and show what is tried.

        Raises:
            RuntimeError: not even one sample fits.
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

    def halve(self, model: Any, rows: int, error: Exception) -> None:
        """Halve the size, after a batch that did not fit in memory.

        Args:
            rows: samples of the batch.
            error: how it failed.

        Raises:
            RuntimeError: there is no smaller size.

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
        """Raise a RuntimeError with another error as its cause."""
        raised = RuntimeError(message)
        add_note(raised, f"The error was: {error}")  # of `fit`, Keras takes the cause away
        raise raised from error


class SizeTrials:
    """Tries sizes on a batch, as `FoundSize.find` asks.

    On a CPU, whether a size fits is predicted from the sizes before it: the peak of resident memory
    grows with the rows. A straight line through the peaks measured so far gives that of the next
    size, which is at most twice the last.

    Args:
        weights: the variables that are trained.
        run: runs two microbatches of so many samples, and changes nothing.

    Attributes:
        error: the last failure, if any was not predicted.
    """

    def __init__(self, backend: Backend, weights: list[Any], run: Callable[[int], None]) -> None:
        self.error: Exception | None = None
        self._backend = backend
        self._run = run
        self._is_measured = backend.is_on_cpu
        self._least = sum(map(_num_bytes_of_sum, weights))  # of the first size, which do not grow
        self._rises: dict[int, int] = {}
        self._start: int | None = None
        self._held = 0  # freed memory that the process had kept, and that trials take first
        self._available: dict[int, float] = {}  # before the trial of a size
        self._has_begun = False

    def fits(self, size: int) -> bool:
        """Return whether two microbatches of `size` samples go through."""
        is_allowed = self._allows(size)
        if is_allowed:
            try:
                for _ in range(1 if self._has_begun else 2):  # the first of all sets up a lot
                    with self._measuring(size):
                        self._run(size)
            except Exception as error:
                self.error = self._backend.out_of_memory(error)
                if self.error is None:
                    raise
                return False
            # It may have taken more than was predicted.
            is_allowed = self._rises.get(size, 0) <= self._available.get(size, math.inf)
        if not is_allowed:
            self.error = None
        return is_allowed

    def _allows(self, size: int) -> bool:
        """Return whether a size is predicted to leave some of the available memory."""
        if not self._rises:
            return True
        available = _memory.available_memory() * (1 - _MARGIN)
        taken = _memory.resident_memory() - (self._start or 0)  # and kept for the next trial
        self._available[size] = available + taken
        return bool(self._predicted(size) <= available + taken)

    def _predicted(self, size: int) -> Any:
        sizes = sorted(self._rises)
        last, rise = sizes[-1], float(self._rises[sizes[-1]])
        if len(sizes) == 1:
            return rise + max(0.0, rise - self._least) * (size - last) / last
        if self._held > _SMALL * self._available.get(size, math.inf):
            # Rises are what is left above the held memory, and say little of slopes.
            taken = max(0.0, self._held + rise - self._least)
            return rise + taken * (size - last) / last
        slopes: list[float] = [(rise - self._rises[s]) / (last - s) for s in (sizes[0], sizes[-2])]
        return rise + max([0.0, *slopes]) * (size - last)

    @contextlib.contextmanager
    def _measuring(self, size: int) -> Iterator[None]:
        """Note the peak of what runs inside as that of a size."""
        if not self._is_measured:
            yield
            return
        if self._start is None and self._has_begun:
            self._start, self._held = _memory.resident_memory(), _memory.held_memory()
        _memory.reset_peak_memory()
        yield
        if self._start is not None:
            self._rises[size] = _memory.peak_memory() - self._start
        self._has_begun = True


def _num_bytes_of_sum(weight: Any) -> int:
    """Return how many bytes a window's sum of gradients takes."""
    is_double = _numbers.sum_dtype(weight.dtype) == "float64"
    return int(math.prod(weight.shape)) * (8 if is_double else 4)


def _largest(fits: Callable[[int], bool], most: int) -> tuple[int, int | None]:
    """Return a size that fits, 0 if none does, and the smallest that was found not to fit, if any.

    The largest size that fits is at most a tenth larger: each trial takes time.
    """
    fitting, size = 0, 1
    while fits(size):
        fitting = size
        if size == most:
            return size, None
        size = min(2 * size, most)
    while size - fitting > max(1, fitting // 10):
        middle = (fitting + size) // 2
        if fits(middle):
            fitting = middle
        else:
            size = middle
    return fitting, size


def _show(is_verbose: bool, text: str, is_last: bool) -> None:
    """Show the progress of the search, in one line if a terminal or notebook can rewrite it."""
    if is_verbose and (sys.stdout.isatty() or "ipykernel" in sys.modules):
        print(f"\r{text:<78}", end="\n" if is_last else "", flush=True)
    elif is_verbose and is_last:
        print(text, flush=True)


_LESS = (
    "Use a smaller model or smaller samples, compute in `mixed_float16`, or stop other programs "
    "that use the device's memory"
)


def _trying_message(size: int) -> str:
    samples = "sample" if size == 1 else "samples"
    return f'microbatch_size="auto": trying {size} {samples} per microbatch ...'


def _found_message(size: int, failed: int | None, was_tried: bool) -> str:
    """Return the message about the size that "auto" has found.

    Args:
        size: samples of the largest microbatch that fits.
        failed: those of the smallest that does not, or None.
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
        f"Received: {model!r}, which runs out of memory with 1 sample. {_LESS}."
    )


def _halved_message(model: str, size: int, half: int) -> str:
    return (
        f"A batch of {model!r} no longer fits in memory with {size} samples at a time. It is "
        f"retried with {half}, and `model.microbatch_size` is {half} from now on. To search for a "
        'larger size again, set `model.microbatch_size = "auto"`.'
    )


def torn_message(model: str, size: int, is_own_step: bool) -> str:
    where = "in a custom `train_step`" if is_own_step else "in the update"
    return (
        "A batch that runs out of memory is retried only if its update has not begun. Received: "
        f"{model!r}, out of memory {where} with {size} samples at a time; its weights may be "
        "partly updated. Restore them from a backup or a saved model, and set `microbatch_size` to "
        f"a smaller number, such as {max(1, size // 2)}."
    )
