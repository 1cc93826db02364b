"""Split a batch into microbatches along axis 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class Batch:
    """A batch, and the microbatches that it is split into, in the order of its samples.

    Args:
        data: what `train_step` gets: a nest of tensors of shape (samples, ...), ragged and sparse
            ones too, and None. A scalar has no samples and is part of every microbatch.
        size: samples per microbatch, an integer or int64 scalar tensor; the last one has what is
            left. None leaves the batch whole.
        is_whole: whether it is to be left whole with a size, too.
        is_checked: whether all tensors must have the same number of samples. Otherwise the most of
            them count.
        is_read: whether graphs of microbatches are read, where numbers of samples that are known
            would be constants like any others.

    Raises:
        ValueError: it is to be split, and there are no samples, or their number differs between the
            tensors.
        tf.errors.InvalidArgumentError: the numbers differ, as is found when the graph runs.

    Attributes:
        data: the nest.
        leaves: the tensors in it, without None.
        is_split: whether there may be more than one microbatch.
        is_long: whether there may be more samples than a size that is given.
        is_whole: whether it is left whole in spite of one.
        rows: int64 scalar tensor, samples of the batch. Only where a size is given.
        static_rows: the same as an int where it is known without running the graph, else None.
        size: samples per microbatch. Only where it is given.
        num_microbatches: int64 scalar tensor.
    """

    def __init__(
        self,
        data: Any,
        size: Any,
        is_whole: bool = False,
        is_checked: bool = True,
        is_read: bool = False,
    ) -> None:
        self.data = data
        self.leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
        self.is_split = self.is_long = False
        self.is_whole = size is not None and is_whole
        self.num_microbatches = tf.ones((), tf.int64)
        if size is not None:
            self.leaves = [as_tensor(leaf) for leaf in self.leaves]
        split = [leaf for leaf in self.leaves if _has_rows(leaf)]
        rows = {leaf.shape[0] for leaf in split if leaf.shape.rank is not None} - {None}
        self.static_rows: int | None = rows.pop() if len(rows) == 1 else None
        if size is None:
            return
        self.size = size
        if not split or (rows and is_checked):
            raise ValueError(_rows_message([tuple(leaf.shape) for leaf in split]))
        is_known = not tf.is_tensor(size)
        self.is_long = not is_known or self.static_rows is None or self.static_rows > size
        self.is_split = self.is_long and not is_whole
        has_even_parts = (
            is_known
            and not is_read
            and self.static_rows is not None
            and self.static_rows % size == 0
        )
        self._rows_of_parts: int | None = size if has_even_parts else None
        counts = [rows_of(leaf) for leaf in split]
        checks = [
            tf.debugging.assert_equal(count, counts[0], _rows_message(None))
            for count in counts[1:]
            if any(leaf.shape.rank is None or leaf.shape[0] is None for leaf in split)
            and is_checked
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            self.rows = tf.identity(counts[0] if is_checked else tf.reduce_max(tf.stack(counts)))
        if not is_whole:
            self.num_microbatches = tf.maximum((self.rows + size - 1) // size, 1)

    def forget_rows(self) -> None:
        """Let the step see tensors with any number of samples, as those of data that has so.

        The losses that Keras logs for each output are weighted by a number that shapes tell.
        """
        if tf.executing_eagerly():
            return
        self.static_rows = None
        self.leaves = [
            tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])
            if isinstance(leaf, tf.Tensor) and leaf.shape.rank
            else leaf
            for leaf in self.leaves
        ]
        self.data = self.pack(self.leaves)

    def microbatch(self, index: Any) -> list[Any]:
        """Return the leaves of one microbatch.

        Args:
            index: int64 scalar tensor, from 0 to `num_microbatches` - 1.
        """
        if not self.is_split:
            return self.leaves
        start = index * self.size
        stop = tf.minimum(start + self.size, self.rows)
        return [_part(leaf, start, stop) if _has_rows(leaf) else leaf for leaf in self.leaves]

    @property
    def signature(self) -> list[Any]:
        """What `tf.function` needs to take any microbatch's leaves in one trace: type specs."""
        rows = self._rows_of_parts if self.is_split else self.static_rows
        return self.signature_of(rows)

    def signature_of(self, rows: int | None) -> list[Any]:
        """Return type specs of so many samples, or of any number."""
        return [_spec(leaf, rows) for leaf in self.leaves]

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Return a microbatch's leaves in the structure of the batch."""
        remaining = iter(leaves)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(remaining), self.data
        )


def _has_rows(leaf: Any) -> bool:
    """Return whether a leaf is anything but a scalar."""
    return bool(tf.is_tensor(leaf) and leaf.shape.rank != 0)


def as_tensor(leaf: Any) -> Any:
    """Return a leaf as a dense, ragged or sparse tensor."""
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(leaf)


def rows_of(leaf: Any) -> tf.Tensor:
    """Return the samples of a dense, ragged or sparse tensor: int64 scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def num_rows(data: Any) -> tf.Tensor:
    """Return the rows of the first tensor in a nest: int64 scalar, 1 if there is none."""
    for leaf in keras.tree.flatten(data):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) or len(getattr(leaf, "shape", ())):
            return rows_of(leaf)
    return tf.constant(1, tf.int64)


def count_rows(data: Any) -> int:
    """Return the samples of a batch that is there: the most that one of its tensors has."""
    counts = [0]
    for leaf in tf.nest.flatten(data):
        shape: Any = getattr(leaf, "shape", ())  # an array's, too, which is not copied for that
        if len(shape) > 0:
            counts.append(int(rows_of(leaf)) if shape[0] is None else int(shape[0]))
    return max(counts)


def _part(leaf: Any, start: Any, stop: Any) -> Any:
    """Return the samples from `start` up to `stop`."""
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    other_axes = leaf.dense_shape[1:]
    starts = tf.concat([[start], tf.zeros_like(other_axes)], axis=0)
    return tf.sparse.slice(leaf, starts, tf.concat([[stop - start], other_axes], axis=0))


def _spec(leaf: Any, rows: int | None) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(
            leaf.shape if leaf.shape.rank is None else [rows, *leaf.shape[1:]],
            leaf.dtype,
            leaf.ragged_rank,
            leaf.row_splits.dtype,
        )
    shape = leaf.shape
    if shape.rank:
        shape = tf.TensorShape([rows, *shape[1:]])
    spec = tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec
    return spec(shape, leaf.dtype)


def _rows_message(shapes: list[tuple[int | None, ...]] | None) -> str:
    received = "tensors with different numbers of samples" if shapes is None else f"shapes {shapes}"
    return (
        "`microbatch_size` splits each batch along axis 0, so all its tensors must have the same "
        f"number of samples. Received: {received}. Pass values shared by all samples as scalars, "
        "or store them in the model. If parts of the batch differ in size, such as labelled and "
        "unlabelled samples, write a custom `train_step`, which gets all of them (with "
        '`loss_over="auto"`); use `accumulation_steps`; or set `microbatch_size=None`.'
    )
