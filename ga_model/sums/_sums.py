"""Weighted sums of gradients, and the unit their weights are counted in.

For microbatches i with gradients g_i and weights w_i an update uses

    g = sum_i(w_i * g_i) / sum_i(w_i)

Both sums are kept and the division is made once, at the update. They are kept in a unit u of the
window's own, sum_i((w_i / u) * g_i) and sum_i(w_i / u), which cancels in the mean. It is the first
weight that is not zero, times the power of two at or above the number of microbatches to come. So
a window of one microbatch gives back its gradient bit for bit, a window of equal weights adds its
gradients as they are but for a power of two, and float16 gradients stay about in the range that
they have in the full batch, where a row counts that much less. Where a heavier microbatch comes,
the unit grows by a power of two, and the sums so far shrink by it, which is exact: no gradient is
scaled up, out of the range of float16.

Variables with `overwrite_with_gradient`, such as the scales of float8 layers, take their gradient
as their new value. Of these the maximum over the microbatches counts, as in Keras's own
accumulation: what is tracked there is the largest absolute value among all rows. Such layers
remember how large gradients are, so with them the unit takes the number of microbatches as it is,
and in a full window of equal weights a row's gradient is that of the full batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ga_model.base import _messages
from ga_model.base._numbers import power_of_two
from ga_model.replicas import _strategy
from ga_model.sums._gradient_noise import Squares
from ga_model.sums._one_gradient import (
    added,
    begun,
    in_parts,
    mean_of,
    multiplied,
    padded,
    scaled,
    term_like,
    term_of,
    with_slices,
)
from ga_model.sums._places import Parts


class Weight(NamedTuple):
    """A microbatch's weight in its window's unit.

    Attributes:
        relative: float64 scalar tensor, the weight over `unit`, at most 1.
        unit: float64 scalar tensor. Zero as long as every weight was zero.
    """

    relative: Any
    unit: Any


def in_unit(weight: Any, unit: Any, num_microbatches: Any = 1.0) -> Weight:
    """Return a weight in the window's unit.

    Args:
        weight: scalar number or tensor.
        unit: float64 scalar tensor, the unit so far, zero if there is none yet.
        num_microbatches: 1.0 or a float64 scalar tensor, about how many the window will have.
    """
    weight = _constant(weight)
    least = weight * num_microbatches
    ratio = tf.abs(tf.math.divide_no_nan(least, unit))
    grown = unit * power_of_two(tf.maximum(ratio, 1.0))
    unit = tf.where(tf.equal(unit, 0.0), least, grown)
    return Weight(tf.math.divide_no_nan(weight, unit), unit)


def overwrites(variable: Any) -> bool:
    """Return whether a variable takes its gradient as its new value."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _constant(weight: Any) -> tf.Tensor:
    """A weight counts; it is nothing to differentiate, whatever it was computed from."""
    if isinstance(weight, (int, float)):  # `tf.cast` would take it through float32
        return tf.constant(weight, tf.float64)
    return tf.stop_gradient(tf.cast(weight, tf.float64))


class GradientSum(NamedTuple):
    """The weighted gradients of one microbatch, or the sum of several.

    Attributes:
        gradients: one per variable: a tensor or None; or for rows of it, `Parts` of a microbatch,
            `Rows` while they are summed, `tf.IndexedSlices` as they go to an optimizer.
        maxima: one per variable: None, or the tensor that is to overwrite it, which has no weight.
        total: float64 scalar tensor, the sum of the weights in `unit`.
        unit: float64 scalar tensor.
        squares: what the microbatches tell of the gradient's noise, or None where nobody asks.
    """

    gradients: list[Any]
    maxima: list[Any]
    total: Any
    unit: Any
    squares: Squares | None = None

    @classmethod
    def of(
        cls,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        weight: Weight,
        scale: bool,
        noise_of: Any = None,
    ) -> GradientSum:
        """Return the gradients of one microbatch, or without `scale` a sum.

        Args:
            gradients: one per variable, as a tape gives them; or without `scale` those of a sum.
            variables: the variables.
            weight: the microbatch's weight.
            scale: whether the gradients still have to be multiplied by it.
            noise_of: the optimizer that the gradients are for, if somebody asks for `squares`.

        Raises:
            ValueError: the lengths differ.
        """
        if len(gradients) != len(variables):
            counts = f"{len(gradients)} gradients", f"{len(variables)} variables"
            raise ValueError(_messages.lengths_message(*counts))
        is_empty = tf.equal(weight.relative, 0.0)
        maxima = [
            _finite_if(is_empty, g) if overwrites(v) else None for g, v in zip(gradients, variables)
        ]
        gradients = [None if overwrites(v) else in_parts(g) for g, v in zip(gradients, variables)]
        if scale:
            gradients = [scaled(gradient, weight.relative) for gradient in gradients]
        squares = None
        if noise_of is not None:
            slices = [g.slices() if isinstance(g, Parts) else g for g in gradients]
            squares = Squares.of(slices, weight.relative, noise_of)
        return cls(list(gradients), maxima, *weight, squares)

    def is_finite(self) -> tf.Tensor:
        """Return whether all gradients are, a bool scalar."""
        values = [g.slices().values if isinstance(g, Parts) else g for g in self.values()]
        present = [value for value in values if value is not None]
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in present])

    def counted_if(self, condition: Any, unit: Any) -> GradientSum:
        """Return the sum with its weight, or without any where `condition` does not hold.

        Args:
            condition: bool scalar tensor.
            unit: float64 scalar tensor, the unit before this microbatch.
        """
        return self._replace(
            maxima=[
                None if m is None else tf.where(condition, m, m.dtype.min) for m in self.maxima
            ],
            total=tf.where(condition, self.total, 0.0),
            unit=tf.where(condition, self.unit, unit),
            squares=self.squares and self.squares.counted_if(condition),
        )

    def begin(self, variables: Sequence[Any]) -> GradientSum:
        """Return the first microbatch as a sum that others are added to.

        It is of float32 or better, and zero where the microbatch has no weight: the loss of such a
        one may be 0 / 0.
        """
        has_weight = tf.not_equal(self.total, 0.0)
        gradients = [
            None if g is None else begun(g, v, has_weight)
            for g, v in zip(self.gradients, variables)
        ]
        return self._replace(gradients=gradients)

    def shrink_for(self, other: GradientSum) -> tf.Tensor:
        """Return what this sum is multiplied by beside another one: a power of two, mostly 1."""
        return tf.math.divide_no_nan(self.unit, other.unit)

    def case_of(self, other: GradientSum) -> tf.Tensor:
        """Return what becomes of this sum where another one is added, an int32 scalar tensor.

        0: nothing, as a microbatch without weight is left out, not multiplied. 1: the other one
        takes its place. 2: they are added. 3: they are, after this one has shrunk.
        """
        is_empty, is_first = tf.equal(other.total, 0.0), tf.equal(self.unit, 0.0)
        is_same_unit = tf.equal(self.shrink_for(other), 1.0)
        return tf.where(is_empty, 0, tf.where(is_first, 1, tf.where(is_same_unit, 2, 3)))

    def plus(
        self, other: GradientSum, variables: Sequence[Any], in_one_pass: bool = False
    ) -> GradientSum:
        """Return the sum with another one, whose unit has grown from that of this sum.

        Of two without any weight, the gradients mean nothing.

        Args:
            other: the sum, or a microbatch.
            variables: the variables.
            in_one_pass: whether to choose between the cases by entry, and not between branches.
                That is for dense gradients under XLA, which makes one pass over memory of it, and
                would copy what goes into a branch.
        """
        shrink = self.shrink_for(other)
        terms = [
            (a, term_like(a, b, v), v)
            for a, b, v in zip(self.gradients, other.gradients, variables)
            if a is not None
        ]
        if in_one_pass:
            is_empty, is_first = tf.equal(other.total, 0.0), tf.equal(self.unit, 0.0)
            sums = [
                tf.where(is_empty, a, tf.where(is_first, b, added(multiplied(a, shrink, v), b, v)))
                for a, b, v in terms
            ]
        elif terms:
            branches = [
                lambda: [a for a, _, _ in terms],
                lambda: [b for _, b, _ in terms],
                lambda: [added(a, b, v) for a, b, v in terms],
                lambda: [added(multiplied(a, shrink, v), b, v) for a, b, v in terms],
            ]
            sums = tf.switch_case(self.case_of(other), branches)
        else:
            sums = []
        return GradientSum(
            _with_nones(sums, self.gradients),
            _maxima(self, other),
            self.total * shrink + other.total,
            other.unit,
            self.squares and other.squares and self.squares.plus(other.squares, shrink),
        )

    def as_terms(self, variables: Sequence[Any]) -> GradientSum:
        """Return the first microbatch as a sum that others are added to with `plus_alike`."""
        gradients = [
            None if g is None else term_of(g, v) for g, v in zip(self.gradients, variables)
        ]
        return self._replace(gradients=gradients)

    def plus_alike(self, other: GradientSum, variables: Sequence[Any]) -> GradientSum:
        """Return the sum with a microbatch that counts alike, whose weights are not looked at."""
        gradients = [
            None if a is None else added(a, term_like(a, b, v), v)
            for a, b, v in zip(self.gradients, other.gradients, variables)
        ]
        return self._replace(gradients=gradients, maxima=_maxima(self, other))

    def mean(self, variables: Sequence[Any], least: float | None = 0.0) -> list[Any]:
        """Return what an optimizer is to be given, in the variables' dtypes.

        Args:
            variables: the variables.
            least: what the sum of weights counts as at least, or None where gradients are summed
                and not averaged.
        """
        total = None if least is None else self.total
        if least:
            total = tf.maximum(total, tf.math.divide_no_nan(least, self.unit))
        means = [mean_of(g, total, v.dtype) for g, v in zip(self.gradients, variables)]
        maxima = [mean_of(m, None, v.dtype) for m, v in zip(self.maxima, variables)]
        return self._replace(gradients=means, maxima=maxima).values()

    def of_replica(self, variables: Sequence[Any]) -> GradientSum:
        """Return the sum so that `mean` gives the replica's share of the mean over all replicas.

        The shares add up to sum(w_i * g_i) over all microbatches of all replicas, over the mean
        over replicas of sum(w_i). It is their mean and not their sum because a replica's gradients
        are those of a loss that is divided by the number of replicas: see `_weights`.
        """
        if _strategy.num_replicas() == 1:
            return self.with_slices(variables)
        weight = _strategy.mean_over_replicas(self.total * self.unit)
        divisor = tf.math.divide_no_nan(weight, self.unit)
        share = self.begin(variables)._replace(  # which has no gradients where there is no weight
            maxima=[m if m is None else _strategy.max_over_replicas(m) for m in self.maxima],
            total=divisor,
        )
        return share.or_zero().with_slices(variables)

    def or_zero(self) -> GradientSum:
        """Return the sum so that without any weight its mean is that of zeros, and not 0 / 0."""
        total = tf.where(tf.equal(self.total, 0.0), tf.ones_like(self.total), self.total)
        return self._replace(total=total)

    def padded(self) -> GradientSum:
        """Return the sum with one of few numbers of rows: see `_one_gradient.padded`."""
        return self._replace(gradients=[padded(gradient) for gradient in self.gradients])

    def with_slices(self, variables: Sequence[Any]) -> GradientSum:
        """Return the sum with `tf.IndexedSlices` for the rows of variables."""
        gradients = [with_slices(g, v) for g, v in zip(self.gradients, variables)]
        return self._replace(gradients=gradients)

    def values(self) -> list[Any]:
        """Return the gradient or the maximum of each variable."""
        return [g if m is None else m for g, m in zip(self.gradients, self.maxima)]


def _finite_if(is_empty: Any, maximum: Any) -> Any:
    """Return what is to overwrite a variable: of a microbatch without weight, what is finite."""
    if maximum is None:
        return None
    maximum = tf.convert_to_tensor(maximum)
    return tf.where(is_empty & ~tf.math.is_finite(maximum), maximum.dtype.min, maximum)


def _maxima(a: GradientSum, b: GradientSum) -> list[Any]:
    """Return the larger ones of what is to overwrite variables."""
    return [
        None if x is None else tf.maximum(x, tf.cast(y, x.dtype))
        for x, y in zip(a.maxima, b.maxima)
    ]


def _with_nones(gradients: list[Any], pattern: list[Any]) -> list[Any]:
    """Put None back where `pattern` has it."""
    present = iter(gradients)
    return [None if part is None else next(present) for part in pattern]
