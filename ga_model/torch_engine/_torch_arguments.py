"""The arguments of a call: which have a batch axis, and are split into microbatches."""

from __future__ import annotations

from typing import Any

import keras
import torch

from ga_model.base._internals import mask_of, set_mask
from ga_model.hearing._splitting import NotByRowsError


class Arguments:
    """The arguments of a call: tensors of samples, tensors that all samples share, and the rest.

    A tensor has samples if its axis 0 has not the length 1. A table that all samples share may be
    taken for one that has: its rows then go where the samples go, and the call has to treat rows
    one by one in any case.

    Args:
        args, kwargs: the arguments, nests of anything.
        batch_rows: samples of the step's batch.
        size: samples of it per microbatch.
        most: microbatches that are run, or None for all.

    Attributes:
        tensors: all tensors, and the masks that are attached to them.
        rows: samples of the call.

    Raises:
        NotByRowsError: there are no tensors of samples, or it is not known which they are.
    """

    def __init__(
        self, args: Any, kwargs: Any, batch_rows: int, size: int, most: int | None = None
    ) -> None:
        self._most = most
        self._nest = (args, kwargs)
        self._flat: list[Any] = []  # in the order of `map_structure`, which `packed` uses again
        keras.tree.map_structure(self._flat.append, self._nest)
        self._numbers = [i for i, leaf in enumerate(self._flat) if torch.is_tensor(leaf)]
        tensors = [self._flat[i] for i in self._numbers]
        masks = [mask_of(tensor) for tensor in tensors]
        self._masked = [number for number, mask in enumerate(masks) if mask is not None]
        self.tensors = tensors + [mask for mask in masks if mask is not None]
        self.has_rows = [tensor.ndim > 0 and tensor.shape[0] != 1 for tensor in self.tensors]
        lengths = sorted({t.shape[0] for t, yes in zip(self.tensors, self.has_rows) if yes})
        if not lengths:
            raise NotByRowsError("")
        if len(lengths) > 1:
            raise NotByRowsError(f"its inputs have different numbers of samples {lengths}")
        self.rows = lengths[0]
        # Several samples of a call may come of one of the batch, as where two views are stacked.
        self._size = max(-(-size * self.rows // max(batch_rows, 1)), size)

    @property
    def kind(self) -> str:
        """What tells this call from others of the same layer: all but the tensors' values."""
        flat = [
            (leaf.dtype, leaf.shape[1:]) if torch.is_tensor(leaf) else leaf for leaf in self._flat
        ]
        return repr((flat, keras.tree.map_structure(lambda _: 0, self._nest)))

    def shares(self) -> list[slice]:
        """Return which rows each microbatch has."""
        starts = range(0, self.rows, self._size)[: self._most]
        return [slice(start, min(start + self._size, self.rows)) for start in starts]

    def part(self, tensors: list[Any], share: slice) -> list[Any]:
        """Return the tensors of a microbatch, of these in place of `tensors`."""
        return [t[share] if has_rows else t for t, has_rows in zip(tensors, self.has_rows)]

    def packed(self, tensors: list[Any]) -> tuple[Any, Any]:
        """Return the arguments with these tensors."""
        flat = list(self._flat)
        for i, tensor in zip(self._numbers, tensors):
            flat[i] = tensor
        for number, mask in zip(self._masked, tensors[len(self._numbers) :]):
            i = self._numbers[number]
            flat[i] = flat[i].view_as(flat[i])  # that of the caller keeps its own mask
            set_mask(flat[i], mask)
        leaves = iter(flat)
        # `pack_sequence_as` would give a layer its dicts with sorted keys.
        return keras.tree.map_structure(lambda _: next(leaves), self._nest)  # type: ignore[no-any-return]
