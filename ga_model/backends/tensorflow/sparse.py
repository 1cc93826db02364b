"""Sparse gradients: rows of tables that were looked up, by samples or by positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ga_model.base import _numbers
from ga_model.core.window import Positions, Rows, shrinkage


class Tables:
    """What is known of the tables of a model: by what their rows are looked up."""

    def __init__(self) -> None:
        self._by_position: set[int] = set()  # ids of variables
        self._has_indices: set[int] = set()  # those whose indices were looked at

    def rows_of(
        self, gradient: tf.IndexedSlices, name: int, traces: bool, is_for_any_samples: bool
    ) -> Rows | Positions:
        """Return a sparse gradient as the core takes it.

        Args:
            gradient: of a table.
            name: of the table.
            traces: whether code is traced.
            is_for_any_samples: whether it is for any number of samples.
        """
        is_fixed = gradient.indices.shape[0] is not None
        if not traces:
            self._look_at(name, gradient.indices)
        elif is_fixed and is_for_any_samples:  # so they are not looked up by samples
            self._by_position.add(name)
        kind = Positions if name in self._by_position else Rows
        return kind(gradient.values, gradient.indices, tf.zeros((), tf.float64))

    def _look_at(self, name: int, indices: Any) -> None:
        """Find out of a table of an eager model whether indices are those of positions: 0, 1, ...

        Whose first ones are others has none, as those of samples are.
        """
        if name in self._has_indices and name not in self._by_position:
            return
        self._has_indices.add(name)
        number = indices.shape[0]
        if number > 1 and bool(tf.reduce_all(indices == tf.range(number, dtype=indices.dtype))):
            self._by_position.add(name)
        else:
            self._by_position.discard(name)


def joined(rows: Sequence[Rows | Positions], unit: Any) -> Rows:
    """Return all rows of a window as one sparse gradient in a unit."""
    factors = shrinkage(tf.stack([part.unit for part in rows]), unit)
    factors = tf.unstack(_numbers.like(rows[0].values, factors))
    values = [part.values * factor for part, factor in zip(rows, factors)]
    indices = [part.indices for part in rows]
    if all(isinstance(part, Positions) for part in rows):
        values, indices = _once(values, indices)
    return Rows(tf.concat(values, 0), tf.concat(indices, 0), unit)


def _once(values: list[Any], indices: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return rows by position with each position once: those of the longest microbatch.

    Where microbatches have other indices at a position, they do not follow from it, and stay.
    """
    place = max(range(len(indices)), key=lambda place: int(indices[place].shape[0]))
    longest, total = indices[place], values[place]
    for other, (part, rows) in enumerate(zip(indices, values)):
        number = int(part.shape[0])
        is_same = tf.cast(part, longest.dtype) == longest[:number]
        if not bool(tf.reduce_all(is_same)):
            return values, indices
        if other != place:
            rest = tf.zeros_like(total[number:])
            total = total + tf.concat([rows, rest], 0)
    return [total], [longest]
