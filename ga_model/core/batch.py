"""A batch, and its microbatches: slices along axis 0."""

from __future__ import annotations

from typing import Any

import keras

from ga_model.base import _numbers
from ga_model.base._types import Nest, Scalar, Tensor


class Batch:
    """A batch, and its microbatches in the order of the samples.

    Args:
        data: argument of `train_step`: a nest of tensors and arrays of shape (samples, ...), and
            None. A scalar has no samples and is part of every microbatch.
        size: samples per microbatch; the last one has the rest. None leaves the batch whole.

    Raises:
        ValueError: if `size` is set and no tensor has samples; `microbatch` also raises it if
            tensors of a split batch differ in their number.

    Attributes:
        rows: samples of the longest tensor.
        num_microbatches: number of microbatches, at least 1.
    """

    def __init__(self, data: Nest, size: int | None) -> None:
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
        """Raise ValueError if a batch to split has tensors of different numbers of samples."""
        if self.is_split and self._is_uneven:
            raise ValueError(_rows_message(shapes_in(self._data)))

    def microbatch(self, index: int) -> Nest:
        """Return one microbatch, in the structure of the batch."""
        if not self.is_split:
            return self._data
        self.check_rows()
        size = self._size or self.rows
        return samples_between(self._data, index * size, (index + 1) * size)


def unpack(data: Nest) -> Nest:
    """Return x, y and sample weights of a batch. Data other than a tuple of up to 3 is all x."""
    if isinstance(data, list) and len(data) <= 3:
        data = tuple(data)  # as Keras does: a `torch.utils.data.DataLoader` yields lists
    if not isinstance(data, tuple) or len(data) > 3:
        data = (data,)
    return keras.utils.unpack_x_y_sample_weight(data)


def samples_between(data: Nest, start: int, stop: int) -> Nest:
    """Return the samples from `start` up to `stop` of a nest."""
    return keras.tree.map_structure(
        lambda leaf: _numbers.rows_between(leaf, start, stop) if _has_rows(leaf) else leaf, data
    )


def shapes_in(data: Nest) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays in a nest, in order."""
    return [tuple(leaf.shape) for leaf in keras.tree.flatten(data) if _has_rows(leaf)]


def _has_rows(leaf: Any) -> bool:
    """Return whether a leaf is a tensor or array with at least one axis."""
    return len(getattr(leaf, "shape", ())) > 0


def rows_of(leaf: Tensor) -> Scalar:
    """Return the number of samples of a tensor: an integer, or a scalar computed in a graph."""
    return _numbers.shape_of(leaf)[0]


def num_rows(data: Nest) -> Scalar:
    """Return the number of samples of the first tensor in a nest, or 1 if there is none."""
    return next((rows_of(leaf) for leaf in keras.tree.flatten(data) if _has_rows(leaf)), 1)


def _rows_message(shapes: list[tuple[int, ...]]) -> str:
    return (
        "`microbatch_size` splits each batch along axis 0, so all its tensors must have the same "
        f"number of samples. Received: shapes {shapes}. Pass values shared by all samples as "
        "scalars, or store them in the model. If parts of the batch differ in size, such as "
        'labelled and unlabelled samples, use `accumulation_steps`, or set `loss_over="batch"`.'
    )
