"""Find out what each compiled loss averages over, while it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import keras
import torch

from ga_model.base._internals import added_to_valid_entries, mask_of
from ga_model.hearing._compiled_copy import same_rank, seeing
from ga_model.hearing._split import num_rows
from ga_model.hearing._weights import Term
from ga_model.torch_engine._divisors import Divided, divisors_of
from ga_model.torch_engine._own_calls import LossCall

_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")


def observer_of(entry: Any, compiled: Any, listener: Callable[[], Any]) -> Any:
    """Return a stand-in for one loss: it computes the loss and notes its term in `compiled`.

    Args:
        entry: of the compiled loss, a named tuple.
        compiled: the copy that notes terms.
        listener: returns the `StepLosses` of the step that runs.
    """
    loss, name = entry.loss, entry.name
    reduction = getattr(loss, "reduction", None)
    seen: list[Any] = []
    reduced: list[Any] = []
    twin = seeing(loss, seen, lambda number, weights: reduced.append(number))

    def observe(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        seen.clear()
        reduced.clear()
        if torch.is_tensor(sample_weight):  # which Keras multiplies with the mask in place
            sample_weight = sample_weight.clone()
        value = twin(y_true, y_pred, sample_weight)
        losses = listener()
        call = LossCall(loss, seen[0] if seen else None, y_true, y_pred, sample_weight)
        if losses.computes_itself(name, call, value, reduced[-1] if reduced else None):
            call = call._replace(values=value, computes_itself=True)
        seen.clear()
        reduced.clear()
        values = call.values
        kind = losses.kind_of(name, call)
        is_number = values is not None and values.ndim == 0
        # Else they are the `__call__`'s own, and tried with it.
        is_product = is_number and sample_weight is not None and not call.computes_itself
        rows = num_rows(y_pred)
        weight: Any = rows
        of: Hashable = "rows"
        is_lost = False
        value = value.sum()  # Keras leaves the values of no rows as they are
        if kind is not None and is_number and not is_product:
            if kind == "sum":
                weight, of = None, "sum"
            if isinstance(kind, Divided):
                weight, of = _read(kind, values, y_pred), ("divided", name)
                if weight == 0.0:  # and the value no number
                    leaves = keras.tree.flatten(y_pred)
                    is_lost = kind.loses(values, leaves, leaves)
                    value = 0.0 * sum(leaf.sum() for leaf in leaves)
        elif reduction not in _MEANS:
            weight, of = None, reduction or "none"
        elif values is not None:
            masks = [mask for t in (y_pred, values) if (mask := mask_of(t)) is not None]
            found = _denominator(reduction, values, sample_weight, masks, rows)
            weight, of, once, is_lost = found
            if once:
                value, weight = _with_once(value, weight, once, losses.is_first_of_window)
        is_product = is_product and reduction != "mean_with_sample_weight"
        in_total = value if entry.loss_weights is None else value * entry.loss_weights
        term = Term(name, weight, of, in_total, value, is_product, lost=(is_lost,))
        compiled._terms.append(term)
        return value

    return observe


def _read(kind: Divided, values: Any, y_pred: Any) -> float:
    """Return by what a loss is divided."""
    weight = kind.weight(divisors_of(values, keras.tree.flatten(y_pred)))
    return float("nan") if weight is None else weight


class _Denominator(NamedTuple):
    """The denominator of a mean.

    Attributes:
        weight: the number.
        kind: as `Term` has it.
        once: what it has beside that, however many values there are, or zero.
        is_lost: whether it is zero, and weights that add up to it are not.
    """

    weight: float
    kind: Hashable
    once: float = 0.0
    is_lost: bool = False


def _denominator(
    reduction: str, values: Any, sample_weight: Any, masks: list[Any], rows: int
) -> _Denominator:
    """Return the denominator of a mean over `values`, as `keras.losses.Loss` has it.

    Args:
        reduction: "mean", "sum_over_batch_size" or "mean_with_sample_weight".
        values: loss values of shape (rows, ...), or a scalar where the loss reduced by itself.
        sample_weight: None, or a tensor of shape (rows,), (rows, 1) or (rows, positions).
        masks: bool tensors of shape (rows, positions), to be combined with a logical and.
        rows: rows of the microbatch.
    """
    if values.ndim == 0:
        return _Denominator(float(rows), "rows")
    by_sample_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
    if not masks and not by_sample_weight:
        return _Denominator(float(values.numel()), "rows")
    mask = None
    for part in masks:
        mask = part if mask is None else mask & part
    kind: tuple[Hashable, ...] = (reduction, *(id(part) for part in masks))
    if mask is not None and reduction != "mean_with_sample_weight":
        # Keras scales by prod(shape(mask)) / sum(mask) and divides by prod(shape(values)).
        per_entry = math.prod(values.shape[1:]) / math.prod(mask.shape[1:])
        valid = int(torch.count_nonzero(mask))
        return _Denominator(valid * per_entry, kind, added_to_valid_entries() * per_entry)
    weight = None if mask is None else mask.double()
    if by_sample_weight:
        kind = (*kind, id(sample_weight))
        sample_weight = torch.as_tensor(sample_weight, device=values.device).double()
        if weight is None:
            weight = sample_weight
        else:
            weight, sample_weight = same_rank(weight, sample_weight)
            weight = weight * sample_weight
    total = float(weight.sum())  # type: ignore[union-attr]
    sums = (total, float(weight.to(values.dtype).sum()))  # type: ignore[union-attr]
    is_lost = 0.0 in sums and bool(weight.any())  # type: ignore[union-attr]
    return _Denominator(total, kind, is_lost=is_lost)


def _with_once(value: Any, weight: float, once: float, is_first: bool) -> tuple[Any, float]:
    """Return a mean and its weight so that the weights have what the whole adds to them once."""
    heavier = weight + once if is_first else weight
    return value * ((weight + once) / heavier if heavier else 0.0), heavier
