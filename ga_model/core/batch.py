"""A batch, and its microbatches: rows along axis 0."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base import _numbers


class Batch:
    """A batch, and the microbatches that it is split into, in the order of its rows.

    Args:
        data: what `train_step` gets: a nest of tensors and arrays of shape (rows, ...), and None. A
            scalar has no rows and is part of every microbatch.
        size: rows per microbatch; the last one has what is left. None leaves the batch whole.

    Raises:
        ValueError: it is to be split, and there are no rows; when it is, their number differs
            between the tensors.

    Attributes:
        rows: the most rows that one of the tensors has.
        num_microbatches: how many there are, 1 or more.
    """

    def __init__(self, data: Any, size: int | None) -> None:
        self._data = data
        self._size = size
        counts = [rows_of(leaf) for leaf in keras.tree.flatten(data) if _has_rows(leaf)]
        self.rows = max(counts, default=1)
        self._is_uneven = len(set(counts)) != 1
        if size is not None and not counts:
            raise ValueError(_rows_message([]))
        self.num_microbatches = 1 if size is None else max(-(-self.rows // size), 1)

    _is_uneven = False

    @property
    def is_split(self) -> bool:
        return self.num_microbatches > 1

    def check_rows(self) -> None:
        """Raise ValueError if it is to be split, and the number of rows differs between tensors."""
        if self.is_split and self._is_uneven:
            raise ValueError(_rows_message(shapes_in(self._data)))

    def microbatch(self, index: int) -> Any:
        """Return one microbatch, in the structure of the batch."""
        if not self.is_split:
            return self._data
        self.check_rows()
        size = self._size or self.rows
        return part_of(self._data, index * size, (index + 1) * size)


def unpack(data: Any) -> Any:
    """Return x, y and sample weight of a batch. x is all of it where it is no tuple of up to 3."""
    if isinstance(data, list) and len(data) <= 3:
        data = tuple(data)  # as Keras takes it: a `torch.utils.data.DataLoader` gives lists
    if not isinstance(data, tuple) or len(data) > 3:
        data = (data,)
    return keras.utils.unpack_x_y_sample_weight(data)


def part_of(data: Any, start: int, stop: int) -> Any:
    """Return the rows from `start` up to `stop` of a nest."""
    return keras.tree.map_structure(
        lambda leaf: _numbers.rows_between(leaf, start, stop) if _has_rows(leaf) else leaf, data
    )


def shapes_in(data: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays in a nest, in its order."""
    return [tuple(leaf.shape) for leaf in keras.tree.flatten(data) if _has_rows(leaf)]


def _has_rows(leaf: Any) -> bool:
    """Return whether a leaf is anything but a scalar."""
    return len(getattr(leaf, "shape", ())) > 0


def rows_of(leaf: Any) -> Any:
    """Return the rows of a tensor or an array: an integer, or a scalar that a graph computes."""
    return _numbers.shape_of(leaf)[0]


def num_rows(data: Any) -> Any:
    """Return the rows of the first tensor in a nest, 1 if there is none."""
    return next((rows_of(leaf) for leaf in keras.tree.flatten(data) if _has_rows(leaf)), 1)


def _rows_message(shapes: list[tuple[int, ...]]) -> str:
    return (
        "`microbatch_size` splits each batch along axis 0, so all its tensors must have the same "
        f"number of samples. Received: shapes {shapes}. Pass values shared by all samples as "
        "scalars, or store them in the model. If parts of the batch differ in size, such as "
        'labelled and unlabelled samples, use `accumulation_steps`, or set `loss_over="batch"`.'
    )
