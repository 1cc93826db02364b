"""The weight of a microbatch in its window: the algebra.

Plain Keras minimizes one loss over all samples of the full batch. They arrive in microbatches i,
whose gradients must be combined into that of the full batch. How depends on the reduction of the
compiled loss. With v the loss values before reduction, s the sample weights, m the mask (1 for
valid entries), and all sums over one microbatch:

    reduction                            loss L_i                 full batch
    mean, sum_over_batch_size            sum(v*s) / n             sum_i(n_i * L_i) / sum_i(n_i)
    the same with a mask                 sum(v*s*m) / sum(m)      the same with n_i = sum(m)
    mean_with_sample_weight              sum(v*s*m) / sum(s*m)    the same with n_i = sum(s*m)
    sum, none                            sum(v*s*m)               sum_i(L_i)

n is the number of loss values: samples times positions per sample. The first three are means. The
weight of a microbatch is its denominator, so w_i * L_i is a sum, and one division by sum_i(w_i)
remains. The fourth is additive: nothing is divided. (Where a denominator is zero, Keras makes the
loss zero. So sample weights of both signs that cancel within a microbatch lose its loss: the one
case in which the algebra does not hold.)

Other terms:

* Weight regularizers depend on no samples, so every microbatch has the same one. In a window of
  means it is weighted like the loss: sum_i(w_i * r) / sum_i(w_i) = r. In a window of sums it counts
  in the first microbatch only. If all w_i are zero (fully masked, say), the loss of plain Keras is
  r. So next to a regularizer, a zero weight is replaced by one too small to change a sum.
* Activity regularizers are means over samples since Keras 3.14, and scalars of `add_loss` are
  treated as means. Keras sums a tensor of `add_loss` that is not a scalar, so it counts as a sum.

A model adds its terms before one gradient is taken, so one weight has to serve them all. It does if
the terms' weights are proportional to one another within the window: two outputs without masks, an
activity regularizer next to a mean over samples. If they are not (two outputs with different masks,
a mask next to an activity regularizer), no single sum of gradients is exact, unless the terms'
weights in the full batch, W_t = sum_i(w_ti), are known before the first gradient. They are if the
window is one batch that is split, with n_i of its N samples in microbatch i. Then microbatches are
weighted by samples, and each term is multiplied first:

    sum_i(n_i * sum_t(w_ti / W_t * N / n_i * L_ti)) / N = sum_t(sum_i(w_ti * L_ti) / W_t)

where w_ti / W_t is 1 for a sum.

Each replica r of a `tf.distribute` strategy has its own microbatches, and the optimizer sums the
gradients of all replicas. Under a strategy, Keras divides a loss that is a mean by the number of
replicas R, and does not divide a sum. With gradients g_ri of such losses, the update is, for means,

    g = sum_r(sum_i(w_ri * g_ri)) / (sum_r(sum_i(w_ri)) / R)

R cancels, which leaves the mean over all microbatches of all replicas, whatever their weights. So
each replica divides its sum by the mean of the weights over replicas, and the optimizer sums the
quotients. Sums are only added. W_t is not known there, so terms whose weights are not proportional
cause a warning.

Over several batches, the first mean is exact, the other means are averaged with its weights, and
sums next to a mean are scaled so that they are exact in full windows of equal batches. A warning
names the terms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from ga_model.base import _numbers
from ga_model.base._types import Scalar


class Term(NamedTuple):
    """One term of a model's loss.

    Attributes:
        name: name for messages.
        weight: weight of the microbatch, or None if the term is a sum.
        kind: terms of equal kind have proportional weights.
        value: the term as it enters the total loss.
        is_product: whether it is one number for all samples, times the mean or sum of their
            weights.
        zero_division: bool scalars, whether it was made zero because it was divided by zero.
    """

    name: str
    weight: Scalar | None
    kind: Hashable
    value: Scalar = None
    is_product: bool = False
    zero_division: tuple[Scalar, ...] = ()


class FullBatch(NamedTuple):
    """The batch that a microbatch is a part of.

    Attributes:
        rows: number of its samples, a float64 scalar tensor.
        is_window: whether it makes an update of its own.
        weights: returns the weights of the compiled loss's terms in the batch: float64 scalar
            tensors, zero for sums.
    """

    rows: Scalar
    is_window: bool
    weights: Callable[[], list[Scalar]]


class LossTerms(NamedTuple):
    """The weight that serves the terms of one microbatch's loss, and how to correct the others.

    Attributes:
        weight: weight of the microbatch, or None if the loss is a sum.
        factors: terms to multiply because of that weight: pairs of value and factor.
        regularization: values of the weight regularizers if the loss is a sum.
        exact: names of the terms that `weight` serves.
        mismatch: names of the terms that it does not serve.
    """

    weight: Scalar | None
    factors: list[tuple[Scalar, Scalar]]
    regularization: list[Scalar]
    exact: list[str]
    mismatch: list[str]

    def fold(self, loss: Scalar, relative_weight: Scalar, is_first: Scalar) -> Scalar:
        """Return the loss as it enters a sum over microbatches.

        Args:
            loss: the total loss.
            relative_weight: `weight` in the sum's unit.
            is_first: bool scalar, whether this microbatch is the first of its window.
        """
        if self.weight is not None:
            for value, factor in self.factors:
                loss = loss + _numbers.like(loss, value) * _numbers.like(loss, factor - 1.0)
            return loss * _numbers.like(loss, relative_weight)
        repeated = _numbers.like(loss, _numbers.is_not(is_first))
        for value in self.regularization:
            loss = loss - repeated * _numbers.like(loss, value)
        return loss

    @property
    def is_plain(self) -> bool:
        """Whether the total loss only needs its weight."""
        return not self.factors and not self.regularization


def combine(
    terms: list[Term],
    additional: list[tuple[Scalar, bool]],
    regularization: list[Scalar],
    rows: Scalar,
    steps: Scalar,
    whole: FullBatch | None = None,
) -> LossTerms:
    """Find the weight that serves the terms of a microbatch.

    Args:
        terms: terms of the computed compiled losses.
        additional: losses that layers added: each a scalar, and whether it is a sum over samples.
        regularization: values of the weight regularizers.
        rows: samples of the microbatch.
        steps: parts of equal weight in the window: batches if `whole` is given, otherwise
            microbatches.
        whole: the batch that the microbatch is a part of, if all of it counts.

    Raises:
        ValueError: if a loss with reduction None or "none" is combined with another.
    """
    name = "add_loss or activity_regularizer"
    compiled = terms
    for value, is_sum in additional:
        weight, kind = (None, "sum") if is_sum else (rows, "rows")
        terms = [*terms, Term(name, weight, kind, value)]
    if len(terms) > 1 and any(term.kind == "none" for term in terms):
        raise ValueError(_unreduced_message([term.name for term in terms]))
    means = [term for term in terms if term.weight is not None]
    if terms and not means:
        return LossTerms(None, [], regularization, [term.name for term in terms], [])
    first = means[0] if means else Term("loss", rows, "rows")
    exact = [term.name for term in terms if term.kind == first.kind]
    mismatch = [term.name for term in terms if term.kind != first.kind]
    parts: Scalar = _numbers.float64(1.0)
    if whole is not None and (mismatch or any(term.weight is None for term in terms)):
        parts = whole.rows / _numbers.float64(rows)
    factors = [
        (term.value, _numbers.float64(steps) * parts) for term in terms if term.weight is None
    ]
    weight = first.weight
    unmatched = LossTerms(weight, factors, [], exact, mismatch)
    if whole is None or not mismatch:
        return unmatched
    if {term.kind for term in means} != {"rows"}:
        totals = whole.weights()
        if len(totals) != len(compiled):
            return unmatched
        totals = [_numbers.without_gradient(total) for total in totals]
        for term, total in zip(compiled, totals):
            if term.weight is not None and term.kind != "rows":
                share = _numbers.divide_or_zero(_numbers.float64(term.weight), total)
                factors.append((term.value, share * parts))
        weight = rows
        if not whole.is_window:
            first_totals = [total for term, total in zip(compiled, totals) if term is first]
            weight = (first_totals[0] if first_totals else whole.rows) / parts
    if whole.is_window:
        return LossTerms(weight, factors, [], [*exact, *mismatch], [])
    return LossTerms(weight, factors, [], exact, mismatch)


def rule(weight: Scalar | str, regularization: list[Scalar]) -> LossTerms:
    """Return the terms for a custom rule: a weight, or "sum"."""
    if isinstance(weight, str):
        if weight != "sum":
            raise ValueError(_bad_rule_message(weight))
        return LossTerms(None, [], regularization, [], [])
    return LossTerms(weight, [], [], [], [])


def _unreduced_message(terms: list[str]) -> str:
    return (
        "A loss without reduction cannot be combined with other terms: Keras adds those once per "
        f"loss value. Received: terms {terms}, one of them with reduction None. Set its reduction "
        "to 'sum' or 'sum_over_batch_size'."
    )


def _bad_rule_message(value: str) -> str:
    return (
        "`microbatch_weight` must return a number, a scalar tensor, 'sum' or None. "
        f"Received: {value!r}. Return 'sum' if the loss is a sum over samples."
    )
