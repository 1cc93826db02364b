"""Search for the largest microbatch that fits, and halve it: the same on every backend."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from ga_model.base import _validate
from ga_model.base._internals import add_note


class Trials(Protocol):
    """Tries sizes.

    Attributes:
        error: the last failure, or None if it was predicted.
    """

    error: Exception | None

    def fits(self, size: int) -> bool:
        """Return whether microbatches of `size` samples fit."""


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

    def find(self, model: Any, rows: int, trials: Trials) -> None:
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
        """Let a batch that did not fit be repeated in smaller microbatches.

        Args:
            model: the model.
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
    """Return what `microbatch_size="auto"` has found.

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
