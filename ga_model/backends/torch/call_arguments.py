"""The tensors that a call gets and gives, and their microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import torch

from ga_model.base._internals import mask_of, set_mask


class Nest:
    """A nest of anything, some of it tensors.

    Attributes:
        tensors: all of them, and the masks that are attached to them.
        num_tensors: without the masks.
        others: its other leaves.
    """

    def __init__(self, nest: Any) -> None:
        self._nest = nest
        self._leaves: list[Any] = []  # in the order of `map_structure`, unlike that of `flatten`
        keras.tree.map_structure(self._leaves.append, nest)
        self._places = [i for i, leaf in enumerate(self._leaves) if torch.is_tensor(leaf)]
        found = [self._leaves[place] for place in self._places]
        masks = [mask_of(tensor) for tensor in found]
        self._masked = [place for place, mask in zip(self._places, masks) if mask is not None]
        self.num_tensors = len(found)
        self.tensors = found + [mask for mask in masks if mask is not None]
        self.others = [leaf for leaf in self._leaves if not torch.is_tensor(leaf)]

    def packed(self, tensors: Iterable[Any]) -> Any:
        """Return the nest with other tensors and masks."""
        given, leaves = list(tensors), list(self._leaves)
        for place, tensor in zip(self._places, given):
            leaves[place] = tensor
        for place, mask in zip(self._masked, given[self.num_tensors :]):
            leaves[place] = leaves[place].view_as(leaves[place])  # another may have another mask
            set_mask(leaves[place], mask)
        rest = iter(leaves)
        # `pack_sequence_as` would sort the keys of dicts.
        return keras.tree.map_structure(lambda _: next(rest), self._nest)

    def emptied(self) -> Nest:
        """Return the nest without its tensors, to be packed with others."""
        self._leaves = [0 if torch.is_tensor(leaf) else leaf for leaf in self._leaves]
        self._nest, self.tensors = self.packed([0] * self.num_tensors), []
        return self


class Arguments(Nest):
    """The arguments of a call: tensors of samples, tensors that all samples share, and the rest.

    The first tensor whose axis 0 has not the length 1 has samples, and so have all that are as
    long. A table that all samples share may be taken for one that has: its rows then go where the
    samples go, and the call is found to combine them.

    Args:
        args, kwargs: the arguments, nests of anything.
        size: samples per microbatch.
        most: microbatches that are run, or None for all.

    Attributes:
        rows: samples, or 0 if there are none.
        has_rows: of each tensor, whether it has samples.
    """

    def __init__(self, args: Any, kwargs: Any, size: int, most: int | None) -> None:
        # Keras leaves NumPy arrays as they are where a functional model is called by itself.
        super().__init__(keras.tree.map_structure(_as_tensor, (args, kwargs)))
        self._size, self._most = size, most
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        self.rows = next((shape[0] for shape in shapes if shape and shape[0] != 1), 0)
        self.has_rows = [bool(shape) and shape[0] == self.rows for shape in shapes]

    @property
    def kind(self) -> str:
        """What tells this call from others of a layer: all but the tensors' values."""
        shapes = [
            (t.dtype, tuple(t.shape[1:]) if has_rows else (tuple(t.shape),))
            for t, has_rows in zip(self.tensors, self.has_rows)
        ]
        return repr((shapes, self.others, keras.tree.map_structure(lambda _: 0, self._nest)))

    def shares(self) -> list[slice]:
        """Return which rows each microbatch has."""
        starts = range(0, self.rows, self._size)[: self._most]
        return [slice(start, min(start + self._size, self.rows)) for start in starts]

    def part(self, tensors: Iterable[Any], share: slice) -> list[Any]:
        """Return the tensors of a microbatch, of these in place of `tensors`."""
        return [t[share] if has_rows else t for t, has_rows in zip(tensors, self.has_rows)]


def _as_tensor(leaf: Any) -> Any:
    is_numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    return keras.ops.convert_to_tensor(leaf) if is_numbers else leaf
