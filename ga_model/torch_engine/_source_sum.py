"""The gradients of a split call's inputs and weights, assembled from those of microbatches."""

from __future__ import annotations

from typing import Any

import torch

from ga_model.torch_engine._part import sum_dtype


class SourceSum:
    """The gradient of a source, from those of microbatches.

    Args:
        has_rows: whether each microbatch has rows of its own.
    """

    def __init__(self, has_rows: bool) -> None:
        self._has_rows = has_rows
        self._parts: list[Any] = []
        self._dtype: Any = None
        self._is_own = False  # whether nothing else has the sum

    def add(self, gradient: Any, source: Any) -> None:
        """Add what a microbatch gave: None if there is none."""
        self._dtype = source.dtype
        if self._has_rows:
            self._parts.append((gradient, source))
        elif gradient is not None:
            wide = gradient.to(sum_dtype(gradient))
            if not self._parts:
                self._parts = [wide]
            elif self._is_own and not wide.requires_grad:
                self._parts[0].add_(wide)
            else:
                self._parts = [self._parts[0] + wide]
                self._is_own = not self._parts[0].requires_grad

    def result(self, rows: int) -> Any:
        """Return the gradient, or None.

        Args:
            rows: samples of the call. Those that no microbatch had have zeros.
        """
        if not self._has_rows:
            return self._parts[0].to(self._dtype) if self._parts else None
        if all(gradient is None for gradient, _ in self._parts):
            return None
        parts = [torch.zeros_like(s) if g is None else g for g, s in self._parts]
        missing = rows - sum(len(part) for part in parts)
        if missing:
            parts.append(parts[0].new_zeros((missing, *parts[0].shape[1:])))
        return torch.cat(parts)
