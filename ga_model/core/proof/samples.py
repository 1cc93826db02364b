"""Choose the samples of a trial from a batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from ga_model.base._types import Nest, Tensor
from ga_model.core.batch import num_rows, samples_between


def samples_for_trial(data: Nest, number: int, unseen: Nest = None) -> Iterator[Nest]:
    """Yield `number` samples of a batch, as arrays. Altered copies fill up a smaller batch.

    The largest target comes first, also with another input, because a loss may be divided by
    something rare. Sample weights that are all equal are altered, as later batches may have others.
    If some samples contain NaN or infinity, which may mark missing values, a second choice without
    them follows. Ragged and sparse tensors are not converted, and repeated if there are fewer.

    Args:
        unseen: samples of an earlier batch, which had no gradient, or None. They are added in
            another choice, the first, as a loss may be divided by something that they lack.

    Raises:
        ValueError: there are fewer than three ragged or sparse samples, so all would be equal.
    """
    if any(
        hasattr(leaf, "flat_values") or hasattr(leaf, "dense_shape")
        for leaf in keras.tree.flatten(data)
    ):
        if (rows := int(num_rows(data))) < 3:
            raise ValueError(f"Ragged and sparse samples are not altered. Received: {rows} samples")
        times = -(-number // rows)
        yield samples_between(
            keras.tree.map_structure(lambda x: _repeated(x, times), data), 0, number
        )
        return

    def in_numpy(leaf: Any) -> Any:
        return ops.convert_to_numpy(leaf) if leaf is not None and ops.shape(leaf) else leaf

    data = keras.tree.map_structure(in_numpy, data)
    if isinstance(data, tuple) and len(data) == 3:
        data = *data[:2], keras.tree.map_structure(_uneven, data[2])
    if unseen is not None and shapes_of(unseen) == shapes_of(data):
        few = samples_between(unseen, 0, max(int(num_rows(data)) // 2, 1))
        yield from samples_for_trial(joined(data, few), number)
    is_finite = _are_finite(data, num_rows(data))
    all_places = np.arange(len(is_finite))
    if not is_finite.all():
        yield _samples(data, all_places, number, all_places[~is_finite])
    if is_finite.any():
        yield _samples(data, all_places[is_finite], number)


def shapes_of(data: Nest) -> Any:
    """Return the nest of the shapes of samples."""
    return keras.tree.map_structure(lambda leaf: tuple(getattr(leaf, "shape", ()))[1:], data)


def joined(*parts: Nest) -> Nest:
    """Return the samples of several parts of one structure, as arrays."""

    def join(*leaves: Tensor | None) -> Tensor | None:
        if leaves[0] is None or not ops.shape(leaves[0]):
            return leaves[0]
        return np.concatenate([ops.convert_to_numpy(leaf) for leaf in leaves])

    return keras.tree.map_structure(join, *parts)


def _samples(
    data: Nest, places: np.ndarray, number: int, preferred: Sequence[int] | np.ndarray = ()
) -> Nest:
    """Return `number` of the samples at these indices.

    Args:
        preferred: indices of which some are always chosen.
    """
    rows, generator = len(places), np.random.default_rng(0)
    largest = _largest_rows(data, places)[: number // 4]
    chosen = generator.permutation(rows) if rows >= number else np.arange(number)
    is_first = np.isin(chosen, preferred)
    is_first &= np.cumsum(is_first) <= number // 3
    chosen = np.concatenate([chosen[is_first], chosen[~is_first]])
    others = chosen[~np.isin(chosen, [row for _, row in largest])]
    others = np.sort(others[: number - 2 * len(largest)])

    def taken(array: Any) -> Any:
        if not isinstance(array, np.ndarray) or not array.shape:
            return array
        twins = [(row, row if source is array else row - 1) for source, row in largest]
        array = array[places] if len(array) > rows else array
        array = array if rows >= number else _altered(array, number, generator)
        return array[[*itertools.chain(*twins), *others]]

    return keras.tree.map_structure(taken, data)


def _uneven(weights: Any) -> Any:
    """Return sample weights, some of them made smaller if all are equal."""
    is_float = isinstance(weights, np.ndarray) and weights.ndim and weights.dtype.kind == "f"
    if not is_float or np.ptp(weights):
        return weights
    shares = np.resize([1.0, 0.5, 0.75], len(weights)).reshape(-1, *[1] * (weights.ndim - 1))
    return (weights * shares).astype(weights.dtype)


def _repeated(leaf: Tensor | None, times: int) -> Tensor | None:
    has_rows = leaf is not None and len(leaf.shape) > 0
    return ops.concatenate([leaf] * times) if has_rows and times > 1 else leaf


def _are_finite(data: Nest, rows: int) -> np.ndarray:
    """Return a boolean mask of the samples whose values are all finite."""
    is_finite = np.ones(rows, bool)
    for array in keras.tree.flatten(data):
        is_array = isinstance(array, np.ndarray) and array.shape[:1] == (rows,)
        if is_array and array.dtype.kind not in "iubUSO":
            is_finite &= np.isfinite(array.astype("float32")).reshape(rows, -1).all(1)
    return is_finite


def _largest_rows(data: Nest, places: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Return pairs of an array and the number of its row with the largest sum among `places`.

    If values are missing (not finite), it is the row with most values. Arrays of whole numbers,
    such as labels and masks, come first, and targets before inputs.
    """
    of_wholes: list[tuple[np.ndarray, int]] = []
    others: list[tuple[np.ndarray, int]] = []
    for array in reversed(keras.tree.flatten(data)):
        is_array = isinstance(array, np.ndarray) and array.ndim > 0 and len(array) > places[-1]
        if is_array and array.dtype.kind not in "USO":
            rows = array.reshape(len(array), -1)
            sums = rows.sum(1, "float64")[places]
            if not np.isfinite(sums).all():  # some values are missing
                sums = np.isfinite(rows).sum(1)[places]
            if np.ptp(sums):
                group = of_wholes if np.array_equal(sums, np.round(sums)) else others
                group.append((array, int(np.argmax(sums))))
    return of_wholes + others


def _altered(array: np.ndarray, number: int, generator: np.random.Generator) -> np.ndarray:
    """Return the samples of an array, followed by altered copies.

    Exact copies would hide how a sample depends on the others.
    """
    rows, more = len(array), number - len(array)
    chosen = generator.integers(0, rows, more)
    new = np.array(array[chosen])
    is_number = new.dtype.kind == "f" and np.any(new != np.round(new))
    if new.dtype.kind == "f" and rows < 3:
        noise = generator.normal(size=(2, *new.shape))
        size = float(np.sqrt(np.mean(np.square(array)))) or 1.0
        new = new * (1 + 0.3 * noise[0]) + size * noise[1]
        new[::2] *= -1  # so that samples are on both sides of a threshold
    elif new.dtype.kind in "iub" and rows < 3 and new.size == more:  # a label, or a length
        other = np.where(new > 0, new // 2, new == 0)  # a label that exists
        new = np.where(generator.random(new.shape) < 0.5, other, new)
    elif new.dtype.kind in "iub" and rows < 3:  # ids, or masks
        new = generator.permuted(new, axis=-1)
        share = generator.uniform(0.0, 0.6, (more, *[1] * (new.ndim - 1)))
        new = np.where(generator.random(new.shape) < share, np.zeros_like(new), new)
    elif rows >= 3 and new.dtype.kind in "iubf" and (is_number or new.ndim > 1):
        other = array[(chosen + generator.integers(1, rows, more)) % rows]
        ones = [1] * (new.ndim - 1)
        if is_number:  # a mixture of two samples: probabilities stay probabilities
            new = new + generator.uniform(0.2, 0.8, (more, *ones)) * (other - new)
        else:  # ids, masks or one-hot vectors get the end of another row
            begin = generator.integers(1, max(new.shape[-1], 2), (more, *ones))
            new = np.where(np.arange(new.shape[-1]) < begin, new, other)
    return np.concatenate([array, new.astype(array.dtype)])
