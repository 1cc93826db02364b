"""Lists of tensors in the graph, like those of `tf.TensorArray`, that a loop can carry.

A list is a variant scalar tensor. Appending copies none of the tensors that are in it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def empty(dtype: tf.DType, shape: Any) -> Any:
    """Return a list without tensors.

    Args:
        dtype: of its tensors.
        shape: of its tensors, with None or -1 where they may differ.
    """
    return tf.raw_ops.EmptyTensorList(
        element_shape=_shape(shape), max_num_elements=-1, element_dtype=dtype
    )


def pushed(tensors: Any, tensor: Any) -> Any:
    """Return a list with one more tensor."""
    return tf.raw_ops.TensorListPushBack(input_handle=tensors, tensor=tensor)


def all_pushed(lists: list[Any], tensors: list[Any]) -> list[Any]:
    """Return lists with one more tensor each."""
    return [pushed(pieces, tensor) for pieces, tensor in zip(lists, tensors)]


def joined(first: Any, second: Any, dtype: tf.DType) -> Any:
    """Return the tensors of one list, and behind them those of another."""
    return tf.raw_ops.TensorListConcatLists(input_a=first, input_b=second, element_dtype=dtype)


def item(tensors: Any, index: Any, dtype: tf.DType, shape: Any) -> Any:
    """Return the tensor at an index, int64 scalar."""
    tensor = tf.raw_ops.TensorListGetItem(
        input_handle=tensors,
        index=tf.cast(index, tf.int32),
        element_shape=_shape(shape),
        element_dtype=dtype,
    )
    tensor.set_shape(shape)
    return tensor


def concatenated(tensors: Any, dtype: tf.DType, shape: Any) -> Any:
    """Return the tensors of a list one behind the other along axis 0.

    Args:
        tensors: the list.
        dtype: of its tensors.
        shape: of their rows, so without axis 0.
    """
    tensor, _ = tf.raw_ops.TensorListConcatV2(
        input_handle=tensors,
        element_shape=_shape([None, *shape]),
        leading_dims=tf.zeros((0,), tf.int64),
        element_dtype=dtype,
    )
    tensor.set_shape([None, *shape])
    return tensor


def _shape(shape: Any) -> Any:
    return tf.constant([-1 if size is None else size for size in shape], tf.int32)
