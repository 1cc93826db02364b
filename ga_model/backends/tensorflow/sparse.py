"""Sparse gradients: the rows of a table that were looked up, by samples or by positions."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ga_model.base import _numbers
from ga_model.base._types import Scalar
from ga_model.core.window import Positions, Rows


class Tables:
    """Detects the tables that are looked up by positions instead of samples."""

    def __init__(self) -> None:
        self._is_by_position: dict[int, bool] = {}  # by ids of table variables

    def rows_of(
        self, gradient: tf.IndexedSlices, name: int, traces: bool, is_for_any_samples: bool
    ) -> Rows:
        """Return the sparse gradient of a table in the core's form.

        In a trace for any number of samples, lookups are by position if the number of rows is
        known; in eager mode, if the ids were 0, 1, 2, and so on in all microbatches.
        """
        known, indices = self._is_by_position, gradient.indices
        if not traces:
            known[name] = known.get(name, True) and _counts_up(indices)
        elif is_for_any_samples and indices.shape[0] is not None:
            known[name] = True
        kind = Positions if known.get(name) else Rows
        return kind(gradient.values, indices, tf.zeros((), tf.float64))


def _counts_up(indices: tf.Tensor) -> bool:
    number = indices.shape[0]
    return number > 1 and bool(tf.reduce_all(indices == tf.range(number, dtype=indices.dtype)))


def joined(rows: Sequence[Rows], unit: Scalar, total: Scalar | None = None) -> Rows:
    """Return all rows of a window as one sparse gradient in a unit, or its mean by a total.

    The rows of a window are large, so each pass over them counts. On a CPU, numbers can be read
    without waiting, and most factors are 1.
    """
    divisor = unit if total is None else unit * tf.where(total == 0, tf.ones_like(total), total)
    factors = tf.math.divide_no_nan(tf.stack([part.unit for part in rows]), divisor)
    factors = tf.unstack(_numbers.like(rows[0].values, factors))
    is_read = tf.executing_eagerly() and "CPU" in rows[0].values.device
    values = [
        part.values if is_read and factor == 1.0 else tf.math.multiply_no_nan(part.values, factor)
        for part, factor in zip(rows, factors)
    ]
    indices = [part.indices for part in rows]
    if all(isinstance(part, Positions) for part in rows):
        values, indices = _once(values, indices)
    unit = unit if total is None else None
    return Rows(tf.concat(values, 0), tf.concat(indices, 0), unit)


def _once(
    values: list[tf.Tensor], indices: list[tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Sum rows by position over microbatches, so that each position is there once.

    If microbatches have different indices at a position, return all rows.
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
