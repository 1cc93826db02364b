"""What is said of a size that is looked for."""

from __future__ import annotations

_LESS = (
    "Make the model or its samples smaller, compute in `mixed_float16`, or end what else takes the "
    "device's memory"
)


def trying_message(size: int) -> str:
    samples = "sample" if size == 1 else "samples"
    return f'microbatch_size="auto": trying {size} {samples} per microbatch ...'


def found_message(size: int, failed: int | None, was_tried: bool) -> str:
    """Word what `microbatch_size="auto"` has found.

    Args:
        size: the rows of the largest microbatch that fits.
        failed: those of the smallest that does not, or None.
        was_tried: whether that one was tried, and not only predicted.
    """
    if failed is None:
        return f'microbatch_size="auto": the full batch of {size} samples fits'
    why = "did not fit" if was_tried else "would take more memory than there is"
    return (
        f'microbatch_size="auto": {size} {"sample" if size == 1 else "samples"} per '
        f"microbatch ({failed} {why})"
    )


def no_row_message(model: str) -> str:
    return (
        'With `microbatch_size="auto"` at least one sample must fit in memory. '
        f"Received: {model!r}, whose forward and backward pass of 1 sample does not fit. {_LESS}."
    )


def damaged_message(model: str, size: int) -> str:
    return (
        "A batch is not repeated where memory ran out in a function that XLA compiled, because "
        "TensorFlow may leave variables that it writes to damaged. "
        f"Received: {model!r} with jit_compile=True, which ran out of memory with {size} samples "
        "at a time. Start again from a backup or a saved model, and "
        f"set `microbatch_size` to a number such as {(size + 1) // 2}."
    )


def halved_message(model: str, size: int, half: int) -> str:
    return (
        f"A batch of {model!r} did not fit in memory any more with {size} samples at a time. It is "
        f"repeated with {half}, which is `model.microbatch_size` from now on. To look for a larger "
        'one again, set `model.microbatch_size = "auto"`.'
    )


def torn_message(model: str, size: int, is_own_step: bool) -> str:
    where = "in a `train_step` of its own" if is_own_step else "in the update"
    return (
        "A batch that does not fit is repeated only if its update has not begun. "
        f"Received: {model!r}, which ran out of memory {where}, with {size} samples at a time; "
        "some of its weights may have been updated and others not. Load the weights from before, "
        "from a backup say, and set `microbatch_size` to a smaller number, such as "
        f"{max(1, size // 2)}."
    )


def no_size_message(model: str) -> str:
    return (
        '`microbatch_size="auto"` is found by `fit` and `train_on_batch`, before their first '
        f"batch. Received: a call of `train_step` of {model!r} from elsewhere, before a size was "
        "found. Set `microbatch_size` to a number, or train a batch with `train_on_batch` first."
    )
