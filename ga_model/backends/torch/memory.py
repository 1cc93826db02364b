"""Allocations that fail."""

from __future__ import annotations

import gc

import torch

# What an allocation that fails says, where its error has no class of its own.
_EXHAUSTED = ("can't allocate memory", "not enough memory", "out of memory")


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error says that memory is used up."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _EXHAUSTED)


def released(error: Exception) -> Exception:
    """Return an error that holds no tensors, of which memory is freed."""
    error.__context__ = error.__cause__ = None
    error = error.with_traceback(None)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return error
