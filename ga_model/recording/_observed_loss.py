"""Find out what each compiled loss averages over, while it is computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.base._internals import added_to_valid_entries, mask_of
from ga_model.graphs._microbatch import num_rows
from ga_model.hearing._compiled_copy import copy_with, same_rank, seeing
from ga_model.hearing._weights import Term
from ga_model.reading._denominators import OF_SUM, Denominator
from ga_model.reading._loss_reading import DoesNotAddUpError, looks_at_samples_alone
from ga_model.replicas import _strategy


class Readers(NamedTuple):
    """What reads the losses of a step in its graph.

    Attributes:
        read: called with the name of a loss, its values before Keras reduces them, or None if it
            does not, the number that they are reduced to, and the kind of denominator that this
            has if nothing is read; returns the `Denominator` of a loss that gives a single number
            for all samples, else None.
        note_values: called with the values of a loss of Keras's own, and what it got.
        note_reduced: called with values, what Keras reduces them to, and its `Denominator`.
        look_at_weights: called with the name of a loss, and its sample weights.
    """

    read: Callable[[str, Any | None, Any, str], Denominator | None]
    note_values: Callable[[Any, Any], None]
    note_reduced: Callable[[Any, Any, Denominator], None]
    look_at_weights: Callable[[str, Any], None]


def observed(
    compiled: Any,
    note: Callable[[Term], None],
    calls: Any = None,
    check: Callable[[Any, Any, Any], None] | None = None,
    readers: Readers | None = None,
    is_first: Any = True,
) -> Any:
    """Return a copy of a compiled loss that notes the term of every loss it computes.

    The copy computes the loss, as `CompileLoss` does, and its losses are observers that pass
    everything on. What `build` makes is the original's own.

    Args:
        compiled: the `keras.src.trainers.compile_utils.CompileLoss` of a model.
        note: called with each term.
        calls: the `MetricCalls` that get the updates of metrics which track one of several losses,
            in their place. None updates them.
        check: called with every loss, its y_true and y_pred, before it is computed, or None.
        readers: what reads losses, or None.
        is_first: whether nothing stands before in the whole that a mean goes over: a bool
            scalar.
    """

    def observer(entry: Any, copy: Any) -> Any:
        return _observer(entry, copy, check, readers, is_first)

    return copy_with(compiled, observer, note, calls)


def _observer(entry: Any, compiled: Any, check: Any, readers: Readers | None, is_first: Any) -> Any:
    """Return a stand-in for one loss: it computes the loss and notes its term in `compiled`."""
    loss, name = entry.loss, entry.name
    reduction: Any = getattr(loss, "reduction", None)
    is_added = reduction in ("sum", "none", None)

    def in_total(value: Any) -> Any:
        return value if entry.loss_weights is None else value * entry.loss_weights

    def observe(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if check is not None:
            check(loss, y_true, y_pred)
        seen: list[Any] = []
        rows = num_rows(y_pred)
        # For a `__call__` that does not come to Keras's.
        weight, once, reduced = rows, None, None
        kind: Hashable = "rows"
        lost: tuple[Any, ...] = ()

        def note_reduced(number: Any, weights: Any) -> None:
            nonlocal weight, kind, once, lost, reduced
            reduced = number
            if readers is not None and weights is not None:
                readers.look_at_weights(name, weights)
            if is_added:
                of_keras = OF_SUM
            else:
                masks = [mask_of(tensor) for tensor in (y_pred, seen[-1])]
                masks = [mask for mask in masks if mask is not None]
                of_keras = _denominator(reduction, seen[-1], weights, masks, rows)
                weight, kind, once = of_keras.count, of_keras.kind, of_keras.once
                lost = of_keras.lost
            if readers is not None:
                if looks_at_samples_alone(loss, y_true, y_pred):
                    readers.note_values(seen[-1], (y_true, y_pred))
                readers.note_reduced(seen[-1], number, of_keras)

        value = seeing(loss, seen, note_reduced)(y_true, y_pred, sample_weight)
        is_number = bool(seen) and seen[0].shape.rank == 0
        is_product = is_number and sample_weight is not None
        if check is not None and is_number and is_added:
            raise DoesNotAddUpError  # it is known to be a mean, of which Keras takes the sum
        found = None
        if readers is not None and not is_product:
            values = seen[0] if value is reduced else None
            found = readers.read(name, values, value, "sum" if is_added else "rows")
        if found is not None:
            value, term = _read_term(name, value, found, is_first)
            compiled._terms.append(term._replace(value=in_total(value), raw=value))
            return value
        if is_added:
            if reduction == "sum":
                value = tf.reduce_sum(value)  # Keras leaves the values of no rows as they are
            term = Term(name, None, reduction or "none", in_total(value), value, is_product)
            compiled._terms.append(term)
            return value
        value = tf.reduce_sum(value)  # of no rows, as above
        if not is_number:
            value = _strategy.exactly_scaled(value)
        elif (replicas := _strategy.num_replicas()) > 1:
            # Keras leaves the division out there. A mean of no rows is NaN, and would be logged.
            has_rows = tf.greater(num_rows(y_pred), 0)
            value = tf.where(has_rows, value, tf.zeros_like(value)) / replicas
        if once is not None:
            value, weight = _with_once(value, weight, once, is_first)
        is_product = is_product and reduction != "mean_with_sample_weight"
        term = Term(name, weight, kind, in_total(value), value, is_product, lost=lost)
        compiled._terms.append(term)
        return value

    return observe


def _read_term(name: str, value: Any, found: Denominator, is_first: Any) -> tuple[Any, Term]:
    """Return one number that a loss gave as it enters a sum over microbatches, and its term.

    Args:
        name: of the loss.
        value: the number.
        found: what it was read to be divided by.
        is_first: bool scalar tensor, whether the window has no microbatch yet.
    """
    value = tf.reduce_sum(value)  # a tape sums what is no scalar
    if found.count is None:
        return value, Term(name, None, found.kind, is_read=True)
    weight, factor = found.weight_and_factor(is_first)
    if factor is not None:
        value = value * tf.cast(factor, value.dtype)
    return value, Term(name, weight, found.kind, least=found.least, is_read=True)


def _denominator(
    reduction: str, values: Any, sample_weight: Any, masks: list[Any], rows: tf.Tensor
) -> Denominator:
    """Return the denominator of a mean over `values`, as `keras.losses.Loss` has it.

    Args:
        reduction: "mean", "sum_over_batch_size" or "mean_with_sample_weight".
        values: loss values of shape (rows, ...), or a scalar where the loss reduced by itself.
        sample_weight: None, or a tensor of shape (rows,), (rows, 1) or (rows, positions).
        masks: bool tensors of shape (rows, positions), to be combined with a logical and.
        rows: scalar tensor, rows of the microbatch.
    """
    if values.shape.rank == 0:
        return Denominator("rows", rows)
    by_sample_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
    if not masks and not by_sample_weight:
        is_rows = values.shape[1:].is_fully_defined()
        return Denominator(
            "rows" if is_rows else ("entries", values.ref()), tf.size(values, tf.int64)
        )
    mask = None
    for part in masks:
        mask = part if mask is None else tf.logical_and(mask, part)
    kind: tuple[Hashable, ...] = (reduction, *(part.ref() for part in masks))
    if reduction != "mean_with_sample_weight":
        # Keras scales by prod(shape(mask)) / sum(mask) and divides by prod(shape(values)).
        # Of one row, as a replica may be left without any.
        shapes = [tf.cast(tf.shape(tensor)[1:], tf.float64) for tensor in (values, mask)]
        per_entry = tf.math.divide_no_nan(*map(tf.reduce_prod, shapes))
        valid, added = tf.math.count_nonzero(mask, dtype=tf.float64), added_to_valid_entries()
        count, once = valid * per_entry, added * per_entry if added else None
        return Denominator(kind, count, None if once is None else count + once, once)
    weight = None if mask is None else tf.cast(mask, tf.float64)
    lost: tuple[Any, ...] = ()
    if by_sample_weight:
        sample_weight = tf.convert_to_tensor(sample_weight)
        kind = (*kind, sample_weight.ref())
        sample_weight = tf.cast(sample_weight, tf.float64)
        if weight is None:
            weight = sample_weight
        else:
            weight, sample_weight = same_rank(weight, sample_weight)
            weight = weight * sample_weight
        divisor = tf.reduce_sum(tf.cast(weight, values.dtype))  # as Keras adds up
        lost = (tf.equal(divisor, 0) & tf.reduce_any(tf.not_equal(weight, 0)),)
    return Denominator(kind, tf.reduce_sum(weight), lost=lost)


def _with_once(value: Any, weight: Any, once: Any, is_first: Any) -> tuple[Any, Any]:
    """Return a mean and its weight so that the weights have what the whole adds to them once.

    Args:
        value: the mean, a sum divided by `weight + once`.
        weight: what it counts: float64 scalar tensor.
        once: what is added to that: float64 scalar tensor.
        is_first: whether it is added here: a bool scalar.
    """
    share = once / _strategy.num_replicas()
    heavier = tf.where(is_first, weight + share, weight)
    factor = tf.math.divide_no_nan(weight + once, heavier)
    return value * tf.cast(factor, value.dtype), heavier
