"""Messages of `microbatch_size="auto"`."""

from __future__ import annotations

_LESS = (
    "Use a smaller model or smaller samples, compute in `mixed_float16`, or stop other programs "
    "that use the device's memory"
)


def trying_message(size: int) -> str:
    samples = "sample" if size == 1 else "samples"
    return f'microbatch_size="auto": trying {size} {samples} per microbatch ...'


def found_message(size: int, failed: int | None, was_tried: bool) -> str:
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


def no_row_message(model: str) -> str:
    return (
        'With `microbatch_size="auto"`, at least one sample must fit in memory. '
        f"Received: {model!r}, which runs out of memory with 1 sample. {_LESS}."
    )


def halved_message(model: str, size: int, half: int) -> str:
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
