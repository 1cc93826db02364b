"""The weight of a microbatch in its window: the algebra.

Plain Keras on the whole window minimizes one loss over all its rows. The rows arrive in
microbatches i, and the gradient of the whole has to be put together from the gradients of the
parts. How, follows from the reduction of the compiled loss. With v the loss values before
reduction, s the sample weights, m the mask (1 for valid entries), and all sums running over one
microbatch:

    reduction                            loss L_i                 whole window
    mean, sum_over_batch_size            sum(v*s) / n             sum_i(n_i * L_i) / sum_i(n_i)
    the same with a mask                 sum(v*s*m) / sum(m)      the same with n_i = sum(m)
    mean_with_sample_weight              sum(v*s*m) / sum(s*m)    the same with n_i = sum(s*m)
    sum, none                            sum(v*s*m)               sum_i(L_i)

n is the number of loss values: rows times the positions of a row. The first three are means, and
the weight of a microbatch is its own denominator, so w_i * L_i is a plain sum again and one
division by sum_i(w_i) is left for the end. The fourth is additive: nothing is divided. (Where a
denominator is zero, Keras makes the loss zero; sample weights of both signs that cancel out within
a microbatch therefore lose it, and are the one case in which the algebra does not hold.)

Terms beside the compiled loss:

* Weight regularizers depend on no rows, so every microbatch has the same one. In a window of
  means it takes part like everything else: sum_i(w_i * r) / sum_i(w_i) = r. In a window of sums it
  is counted with the first microbatch only. Where all w_i are zero (masked, say), the loss of plain
  Keras is r. So beside a regularizer a weight of zero counts as one too small to change a sum.
* Activity regularizers are means over rows since Keras 3.14, and a scalar of `add_loss` is taken as
  one. A tensor of `add_loss` that is no scalar is summed by Keras, and counts as a sum.

A model adds its terms up before one gradient is taken, so one weight has to serve them all. It does
wherever the terms' weights are proportional to one another within the window: two outputs without
mask, an activity regularizer beside a mean over rows. Where they are not (two outputs with
different masks, a mask beside an activity regularizer) no single sum of gradients can give the
result, unless the terms' weights in the whole window, W_t = sum_i(w_ti), are known before the first
gradient. They are where the window is one batch that is split, with n_i of its N rows in microbatch
i. The microbatches then are weighted by rows, and each term is multiplied first:

    sum_i(n_i * sum_t(w_ti / W_t * N / n_i * L_ti)) / N = sum_t(sum_i(w_ti * L_ti) / W_t)

and for a sum w_ti / W_t is 1.

Replicas r of a `tf.distribute` strategy have microbatches of their own, and an optimizer adds up
what they give it. Under a strategy Keras divides a loss that is a mean by the number of replicas R,
and does not divide a sum. With gradients g_ri of such losses the update is, for means,

    g = sum_r(sum_i(w_ri * g_ri)) / (sum_r(sum_i(w_ri)) / R)

The R cancels, and what is left is the mean over all microbatches of all replicas, however different
their weights. So each replica divides its own sum by the mean over replicas of the weights, and the
optimizer's sum is the rest. Sums are just added up. W_t is not known there, and terms whose weights
are not proportional are told.

Over several batches, the first mean is exact, the other means are
averaged with its weights, and sums beside a mean are scaled so that they are exact in full windows
of equal batches. A warning tells.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ga_model.base import _numbers


class Term(NamedTuple):
    """One term of a model's loss.

    Attributes:
        name: what messages call it.
        weight: scalar tensor, or None where the term is a sum.
        kind: terms of equal kind have proportional weights.
        value: the term as it stands in the total.
        is_product: whether it is one number for all rows, times the mean or sum of their weights.
        lost: bool scalars, each whether it was made zero because it was divided by zero.
    """

    name: str
    weight: Any | None
    kind: Hashable
    value: Any = None
    is_product: bool = False
    lost: tuple[Any, ...] = ()


class FullBatch(NamedTuple):
    """The batch that a microbatch is a part of.

    Attributes:
        rows: its rows, a float64 scalar tensor.
        is_window: whether it makes an update of its own.
        weights: function that returns the weights that the terms of the compiled loss have in it,
            float64 scalar tensors, zero for sums.
    """

    rows: Any
    is_window: bool
    weights: Callable[[], list[Any]]


class LossTerms(NamedTuple):
    """What the terms of one microbatch's loss ask for.

    Attributes:
        weight: scalar tensor, the microbatch's weight, or None where the window is a plain sum.
        factors: terms that have to be multiplied to live with that weight: value and factor.
        regularization: values of the weight regularizers where the window is a plain sum.
        exact: names of the terms that `weight` serves.
        mismatch: names of the terms that it does not.
    """

    weight: Any | None
    factors: list[tuple[Any, Any]]
    regularization: list[Any]
    exact: list[str]
    mismatch: list[str]

    def fold(self, loss: Any, relative_weight: Any, is_first: Any) -> Any:
        """Return `loss` as it enters a sum over microbatches.

        Args:
            loss: the total loss.
            relative_weight: scalar tensor, `weight` in the sum's unit.
            is_first: bool scalar tensor, whether this microbatch is the first one.
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
        """Whether the gradient of the total needs no more than its weight."""
        return not self.factors and not self.regularization


def combine(
    terms: list[Term],
    additional: list[tuple[Any, bool]],
    regularization: list[Any],
    rows: Any,
    steps: Any,
    whole: FullBatch | None = None,
) -> LossTerms:
    """Find the weight that serves a microbatch's terms.

    Args:
        terms: the terms of the compiled losses that were computed.
        additional: losses that the model's layers added: the scalar, and whether Keras made it by
            summing.
        regularization: values of the weight regularizers.
        rows: scalar tensor, rows of the microbatch.
        steps: scalar tensor, parts of equal weight that the window has: batches with `whole`,
            else microbatches.
        whole: the batch, where the microbatch is a part of one that is known to count whole.

    Raises:
        ValueError: a loss with reduction None or "none" is combined with another.
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
    parts: Any = _numbers.float64(1.0)
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
        totals = [_numbers.constant(total) for total in totals]
        for term, total in zip(compiled, totals):
            if term.weight is not None and term.kind != "rows":
                share = _numbers.share(_numbers.float64(term.weight), total)
                factors.append((term.value, share * parts))
        weight = rows
        if not whole.is_window:
            of_first = [total for term, total in zip(compiled, totals) if term is first]
            weight = (of_first[0] if of_first else whole.rows) / parts
    if whole.is_window:
        return LossTerms(weight, factors, [], [*exact, *mismatch], [])
    return LossTerms(weight, factors, [], exact, mismatch)


def rule(weight: Any, regularization: list[Any]) -> LossTerms:
    """Return the terms for a rule of the user's own: a weight, or "sum"."""
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
