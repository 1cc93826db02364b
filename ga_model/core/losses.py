"""Losses of a recorded step: what they average over, and the resulting weight of a microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
from keras import ops

from ga_model.base import _numbers
from ga_model.base._internals import mask_of, same_rank, scale_for_replicas
from ga_model.base._types import Nest, Scalar, Tensor
from ga_model.core import messages
from ga_model.core.backend_types import GradientSums
from ga_model.core.batch import num_rows, unpack
from ga_model.core.models import is_of_keras
from ga_model.core.user_code import is_by_sample
from ga_model.core.weights import FullBatch, LossTerms, Term, combine, rule

if TYPE_CHECKING:
    from ga_model.core.backend import Backend

_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")


class NeedsTrialError(Exception):
    """Raised before anything runs: a custom loss must be tried first."""


class Kinds(NamedTuple):
    """Reductions of custom losses over samples: "mean" or "sum".

    Attributes:
        compiled: names of compiled losses, and their kinds.
        added: kinds of the losses that layers add, in order.
    """

    compiled: tuple[tuple[str, str], ...] = ()
    added: tuple[str, ...] = ()

    @property
    def has_sum(self) -> bool:
        """Whether a custom loss is a sum. Untried losses count as means."""
        return "sum" in (*self.added, *(kind for _, kind in self.compiled))


class Position(NamedTuple):
    """Position of a microbatch in its window.

    Attributes:
        steps: batches per window.
        num_microbatches: microbatches per window.
        parts: see `Numbers`.
        is_first: bool scalar, whether no microbatch of the window has counted yet.
        unit: current unit of the weights, or zero.
        full_batch: the batch, if it is split.
        sums: sums that the backward pass adds gradients to, or None.
    """

    steps: Scalar
    num_microbatches: Scalar
    parts: Scalar
    is_first: Scalar
    unit: Scalar
    full_batch: FullBatch | None
    sums: GradientSums | None = None

    def in_unit(self, weight: Scalar) -> tuple[Scalar, Scalar]:
        """Return the new unit of the window, and the microbatch's weight in it.

        Args:
            weight: weight of the microbatch.
        """
        least = abs(weight * self.parts)
        unit = _numbers.where(least > self.unit, least, self.unit)
        return unit, _numbers.divide_or_zero(weight, unit)


class StepLosses:
    """The losses of one recorded step, collected while it runs.

    Args:
        model: the recorded model.
        backend: the backend of the model.
        data: the microbatch, as `train_step` gets it.
        position: its position in the window.
        kinds: known kinds of custom losses, or None if they need a trial.

    Attributes:
        compiled: terms of the compiled loss.
        zero_division: bool scalars, whether a term was made zero because it was divided by zero.
        values: values of custom compiled losses that return a single number, by name.
        added: losses that layers added, followed by weight regularizers.
        has_own: whether `compute_loss` or one of the losses is custom.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        data: Nest,
        position: Position,
        kinds: Kinds | None,
    ) -> None:
        self._model, self._backend = model, backend
        self._data = data
        self._position = position
        self.compiled: list[Term] = []
        self._additional: list[Scalar] = []  # of layers, then of weight regularizers
        self._cached_terms: tuple[tuple[int, int], LossTerms] | None = None
        self.zero_division: list[Scalar] = []
        self.values: dict[str, Scalar] = {}
        self.added: list[Scalar] = []
        self.has_own = not is_of_keras(model, "compute_loss")
        self._kinds = kinds
        self._is_ruled = model._overrides_microbatch_weight()

    def entries(self) -> tuple[Scalar, ...]:
        """Return the number of loss values of each unmasked mean, if there are several."""
        counts = [term.weight for term in self.compiled if term.kind == "rows"]
        return tuple(map(_numbers.float64, counts)) if len(counts) > 1 else ()

    def release(self) -> None:
        """Release all tensors."""
        self.compiled, self._additional, self._cached_terms = [], [], None
        self.added, self.zero_division, self.values, self._data = [], [], {}, None

    def note_term(self, term: Term) -> None:
        """Record a term of the compiled loss."""
        if term.is_product and not self._is_ruled:
            self._model._warn_once(messages.product_message(term.name, self._model.name))
        self.compiled.append(term)
        self.zero_division += term.zero_division

    def note_additional(self, total: Scalar) -> None:
        """Record a loss that a layer or a regularizer added, after Keras reduced it to a scalar."""
        self._additional.append(total)
        self.added.append(ops.stop_gradient(total))

    def terms(self) -> LossTerms:
        """Return the terms of the loss so far, with the weight that serves them."""
        lengths = (len(self.compiled), len(self._additional))
        if self._cached_terms is None or self._cached_terms[0] != lengths:
            self._cached_terms = (lengths, self._combine())
        return self._cached_terms[1]

    @property
    def has_warning(self) -> bool:
        """Whether a warning was given that no single weight serves all terms."""
        return bool(self.terms().mismatch) or any(term.is_product for term in self.compiled)

    def _combine(self) -> LossTerms:
        # Keras adds the losses of layers first, then those of weight regularizers.
        regularizers = [v for v in self._model.trainable_weights if getattr(v, "regularizer", None)]
        num_of_layers = max(0, len(self._additional) - len(regularizers))
        regularization = self._additional[num_of_layers:]
        additional = [
            (value, self._is_sum_of_samples(index))
            for index, value in enumerate(self._additional[:num_of_layers])
        ]
        weight = self._backend.microbatch_weight(self._data)
        if weight is not None:
            return rule(weight, regularization)
        position, rows = self._position, self.num_rows()
        # Weights of the full batch do not apply if a part of it may be skipped.
        whole = None if self._model.skip_nonfinite else position.full_batch
        steps = position.num_microbatches if whole is None else position.steps
        terms = combine(self.compiled, additional, regularization, rows, steps, whole)
        if terms.mismatch:
            self._model._warn_once(messages.one_weight_message(terms.exact, terms.mismatch))
        if not (regularization and self.compiled) or terms.weight is None:
            return terms
        return terms._replace(weight=_numbers.at_least_minimum(terms.weight, rows))

    def _is_sum_of_samples(self, index: int) -> bool:
        """Return whether a loss that a layer added is a sum over samples, not a mean."""
        if self._is_ruled:
            return False
        if self._kinds is None:
            raise NeedsTrialError
        return self._kinds.added[index : index + 1] == ("sum",)

    def kind_of(
        self, name: str, loss: keras.losses.Loss, y_true: Nest, y_pred: Nest, number: Scalar | None
    ) -> str:
        """Return the kind of a compiled loss: "rows" (values per sample), "mean" or "sum".

        Args:
            name: name of the loss.
            y_true, y_pred: its arguments.
            number: the result of its `call`, or None if that is not a scalar.

        Raises:
            NeedsTrialError: if the kind is not known.
        """
        assumed = "rows" if number is None else "mean"
        is_loss = isinstance(loss, keras.losses.Loss)
        if self._is_ruled or (is_loss and is_by_sample(loss) and _shapes_fit(loss, y_true, y_pred)):
            return assumed
        if self._kinds is None:
            raise NeedsTrialError
        self.has_own = True
        if number is None:
            return assumed
        self.values[name] = ops.stop_gradient(number)
        return dict(self._kinds.compiled).get(name, assumed)

    def num_rows(self) -> Scalar:
        """Return the number of samples of the microbatch."""
        return num_rows(unpack(self._data)[0])


def _shapes_fit(loss: keras.losses.Loss, y_true: Nest, y_pred: Nest) -> bool:
    """Return whether targets and outputs do not broadcast along the samples."""
    names = type(loss).__name__, getattr(getattr(loss, "fn", None), "__name__", "")
    takes_classes = any("sparse" in name.lower() for name in names)  # targets lack the class axis
    pairs = zip(keras.tree.flatten(y_true), keras.tree.flatten(y_pred))
    shapes = [sorted((tuple(a.shape), tuple(b.shape)), key=len) for a, b in pairs]
    return all(
        len(a) == len(b) or (a == b[:-1] and takes_classes) or (len(a) + 1 == len(b) and b[-1] == 1)
        for a, b in shapes
    )


def observer_of(
    entry: Any, compiled: keras.losses.Loss, losses: StepLosses
) -> Callable[..., Tensor]:
    """Return a stand-in for a loss that computes it and records its term in `compiled`.

    Args:
        entry: named tuple of the compiled loss.
        compiled: the copy of the compiled loss that records terms.
        losses: losses of the running step.
    """
    loss, name = entry.loss, entry.name
    reduction = getattr(loss, "reduction", None)

    def observe(y_true: Nest, y_pred: Nest, sample_weight: Tensor | None = None) -> Tensor:
        seen: list[Tensor] = []
        value = _observed_twin(loss, seen)(y_true, y_pred, sample_weight)
        values = seen[-1] if seen else None
        is_number = values is not None and len(values.shape) == 0
        loss_kind = losses.kind_of(name, loss, y_true, y_pred, values if is_number else None)
        is_product = is_number and sample_weight is not None
        rows = num_rows(y_pred)
        weight: Scalar = rows
        kind: Hashable = "rows"
        zero_division: tuple[Scalar, ...] = ()
        if is_number and not is_product:  # no reduction changes a scalar
            if loss_kind == "sum":
                weight, kind = None, "sum"
            else:  # Keras does not scale it for replicas
                value = scale_for_replicas(value)
        elif reduction not in _MEANS:
            weight, kind = None, reduction or "none"
        elif values is not None:
            masks = [mask for t in (y_pred, values) if (mask := mask_of(t)) is not None]
            weight, kind, zero_division = _denominator(
                reduction, values, sample_weight, masks, rows
            )
        is_product = is_product and reduction != "mean_with_sample_weight"
        total = ops.sum(value)
        value = value if kind == "none" else total  # Keras does not sum losses without reduction
        in_total = total if entry.loss_weights is None else total * entry.loss_weights
        compiled._terms.append(Term(name, weight, kind, in_total, is_product, zero_division))
        return value

    return observe


def _observed_twin(loss: keras.losses.Loss, seen: list[Tensor]) -> keras.losses.Loss:
    """Return a twin of a loss that records the values that it computes.

    Args:
        seen: list that receives the values before reduction.
    """
    if not isinstance(loss, keras.losses.Loss):
        return loss

    class Observed(type(loss)):  # type: ignore[misc]
        def call(self, y_true: Nest, y_pred: Nest) -> Tensor:
            values = super().call(y_true, y_pred)
            # Perhaps a Python number. Converting a ragged tensor would fail.
            is_tensor = ops.is_tensor(values)
            seen.append(values if is_tensor else ops.convert_to_tensor(values))
            return seen[-1]

    twin = object.__new__(Observed)
    object.__setattr__(twin, "__dict__", loss.__dict__)  # shares the state that `call` may change
    return twin


def _denominator(
    reduction: str, values: Tensor, sample_weight: Tensor | None, masks: list[Tensor], rows: Scalar
) -> tuple[Scalar, Hashable, tuple[Scalar, ...]]:
    """Return the denominator of a mean over `values`, as `keras.losses.Loss` computes it.

    Args:
        reduction: "mean", "sum_over_batch_size" or "mean_with_sample_weight".
        values: loss values of shape (samples, ...), or a scalar if the loss reduced them itself.
        sample_weight: None, or a tensor of shape (samples,), (samples, 1) or (samples, positions).
        masks: bool tensors of shape (samples, positions), combined by a logical and.
        rows: number of samples of the microbatch.

    Returns:
        The number, and `kind` and `zero_division` as in `Term`.
    """
    if len(values.shape) == 0:
        return rows, "rows", ()
    by_sample_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
    if not masks and not by_sample_weight:
        return math.prod(_numbers.shape_of(values)), "rows", ()
    mask = None
    for part in map(ops.stop_gradient, masks):
        mask = part if mask is None else ops.logical_and(mask, part)
    kind: tuple[Hashable, ...] = (reduction, *(id(part) for part in masks))
    dtype = _numbers.sum_dtype(values.dtype)
    if mask is not None and reduction != "mean_with_sample_weight":
        # Keras scales by prod(shape(mask)) / sum(mask) and divides by prod(shape(values)).
        shapes = _numbers.shape_of(values), _numbers.shape_of(mask)
        per_entry = math.prod(shapes[0][1:]) / math.prod(shapes[1][1:])
        number = ops.sum(ops.cast(mask, dtype))
        return number * _numbers.like(number, per_entry), kind, ()
    weight = None if mask is None else ops.cast(mask, dtype)
    zero_division: tuple[Scalar, ...] = ()
    if by_sample_weight:
        kind = (*kind, id(sample_weight))
        weights = ops.stop_gradient(ops.convert_to_tensor(sample_weight))
        weights = ops.cast(weights, dtype)
        if weight is not None:
            weight, weights = same_rank(weight, weights)
        weight = weights if weight is None else weight * weights
        divisor = ops.sum(ops.cast(weight, values.dtype))  # in the dtype in which Keras sums
        zero_division = (ops.logical_and(divisor == 0, ops.any(weight != 0)),)
    return ops.sum(weight), kind, zero_division
