"""How much a microbatch counts in its window: the algebra.

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
division by sum_i(w_i) is left for the end. The fourth is additive: nothing is divided.

Terms beside the compiled loss:

* Weight regularizers depend on no rows, so every microbatch has the same one. In a window of
  means it takes part like everything else: sum_i(w_i * r) / sum_i(w_i) = r. In a window of sums it
  is counted with the first microbatch only.
* Losses of `add_loss` and activity regularizers are taken as means over rows, as Keras makes them
  since 3.14.

A model adds its terms up before one gradient is taken, so one weight has to serve them all. It does
wherever the terms' weights are proportional to one another within the window: two outputs without
mask, an activity regularizer beside a mean over rows. Where they are not (two outputs with
different masks, a mask beside an activity regularizer) no single sum of gradients can give the
result; the first mean then is exact, the other means are averaged with its weights, and sums beside
a mean are scaled so that they are exact in full windows of equal microbatches. `LossTerms.mismatch`
names them and a warning goes out.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class Term(NamedTuple):
    """One term of a model's loss.

    Attributes:
        name: what messages call it.
        weight: scalar tensor, or None where the term is a sum.
        kind: terms of equal kind have proportional weights.
        value: the term as it stands in the total.
    """

    name: str
    weight: Any | None
    kind: Hashable
    value: Any


class LossTerms(NamedTuple):
    """The terms of one microbatch's loss.

    Attributes:
        weight: scalar tensor, the microbatch's weight, or None where the window is a plain sum.
        sums_beside_mean: additive terms that have to live with a mean's weight.
        regularization: values of the weight regularizers where the window is a plain sum.
        exact: names of the terms that `weight` serves.
        mismatch: names of the terms that it does not.
    """

    weight: Any | None
    sums_beside_mean: list[Any]
    regularization: list[Any]
    exact: list[str]
    mismatch: list[str]

    def fold(self, loss: Any, relative_weight: Any, steps: Any, is_first: Any) -> Any:
        """Return `loss` as it enters the window's sum.

        Args:
            loss: the total that `compute_loss` returned.
            relative_weight: scalar tensor, `weight` in the window's unit.
            steps: scalar tensor, the window's `accumulation_steps`.
            is_first: bool scalar tensor, whether this microbatch opens the window.
        """
        if self.weight is not None:
            for value in self.sums_beside_mean:
                loss = loss + tf.cast(value, loss.dtype) * tf.cast(steps - 1, loss.dtype)
            return loss * tf.cast(relative_weight, loss.dtype)
        repeated = tf.cast(tf.logical_not(is_first), loss.dtype)
        for value in self.regularization:
            loss = loss - repeated * tf.cast(value, loss.dtype)
        return loss

    @property
    def is_plain(self) -> bool:
        """Whether the gradient of the total needs no more than its weight."""
        return not self.sums_beside_mean and not self.regularization


def num_rows(data: Any) -> tf.Tensor:
    """Return the rows of the first tensor in a nest: int64 scalar, 1 if there is none."""
    for leaf in keras.tree.flatten(data):
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int64)
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        shape = getattr(leaf, "shape", ())
        if len(shape):
            return tf.shape(leaf, out_type=tf.int64)[0]
    return tf.constant(1, tf.int64)


def loss_terms(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> LossTerms:
    """Find the terms of `model`'s compiled loss and the weight that serves them.

    Args:
        model: a compiled Keras model whose `compute_loss` has just run on the other arguments.
        x: inputs, a nest of tensors of shape (rows, ...).
        y: targets, a nest of tensors of shape (rows, ...), or None.
        y_pred: outputs, a nest of tensors of shape (rows, ...), or None if they are not known.
        sample_weight: None, or a nest of tensors of shape (rows,) or (rows, positions).
    """
    rows = num_rows(y_pred if y_pred is not None else x)
    terms = _compiled_terms(model, y, y_pred, sample_weight, rows)
    regularizers = _regularized(model)
    if len(model.losses) > len(regularizers):
        terms.append(Term("add_loss or activity_regularizer", rows, "rows", None))
    means = [term for term in terms if term.weight is not None]
    if terms and not means:
        regularization = [v.regularizer(v) for v in regularizers]
        return LossTerms(None, [], regularization, [term.name for term in terms], [])
    weight, kind = (means[0].weight, means[0].kind) if means else (rows, "rows")
    return LossTerms(
        weight,
        [term.value for term in terms if term.weight is None],
        [],
        [term.name for term in terms if term.kind == kind],
        [term.name for term in terms if term.kind != kind],
    )


def own_terms(model: Any, weight: Any | None) -> LossTerms:
    """Return the terms of a loss whose weight comes from a rule of the user's own."""
    regularizers = [] if weight is not None else _regularized(model)
    return LossTerms(weight, [], [v.regularizer(v) for v in regularizers], [], [])


def _regularized(model: Any) -> list[Any]:
    return [v for v in model.trainable_weights if getattr(v, "regularizer", None)]


def _compiled_terms(
    model: Any, y: Any, y_pred: Any, sample_weight: Any, rows: tf.Tensor
) -> list[Term]:
    """Return a term per compiled loss, in Keras's order.

    Keras matches targets, outputs and sample weights with losses in `CompileLoss.call`. A copy of
    the compiled loss whose losses are observers lets Keras do the matching and shows what each loss
    gets. The copy has no metrics, so that none is updated a second time.
    """
    compiled = model._compile_loss
    if compiled is None or not compiled.built or y_pred is None:
        return []  # a loss of the user's own, which does not use the compiled one
    terms: list[Term] = []

    def observer(entry: Any) -> Any:
        def observe(y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
            terms.append(_term(entry, y_true, y_pred, sample_weight, rows))
            return tf.zeros(())

        return entry._replace(loss=observe)

    copy = object.__new__(type(compiled))
    copy.__dict__.update(compiled.__dict__)
    copy.__dict__["_flat_losses"] = [observer(entry) for entry in compiled._flat_losses]
    copy.__dict__["_metrics"] = [None] * len(compiled._flat_losses)
    copy.call(y, y_pred, sample_weight)
    return terms


def _term(entry: Any, y_true: Any, y_pred: Any, sample_weight: Any, rows: tf.Tensor) -> Term:
    loss, name = entry.loss, entry.name
    reduction = getattr(loss, "reduction", "mean")
    if reduction in ("sum", "none", None):
        value = tf.reduce_sum(loss(y_true, y_pred, sample_weight))
        if entry.loss_weights is not None:
            value = value * tf.cast(entry.loss_weights, value.dtype)
        return Term(name, None, "sum", value)
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return Term(name, rows, "rows", None)  # a reduction of the user's own: rows, like Keras's
    weight, kind = _mean_weight(loss, reduction, y_true, y_pred, sample_weight, rows)
    return Term(name, weight, kind, None)


def _mean_weight(
    loss: Any, reduction: str, y_true: Any, y_pred: Any, sample_weight: Any, rows: tf.Tensor
) -> tuple[Any, Hashable]:
    """Return the denominator of a mean, and its kind. Mirrors `keras.losses.Loss.__call__`."""
    masks = [getattr(y_pred, "_keras_mask", None)]

    def as_tensor(x: Any) -> Any:
        return keras.ops.convert_to_tensor(x, dtype=loss.dtype)

    values = loss.call(
        keras.tree.map_structure(as_tensor, y_true), keras.tree.map_structure(as_tensor, y_pred)
    )
    masks = [mask for mask in (*masks, getattr(values, "_keras_mask", None)) if mask is not None]
    if values.shape.rank == 0:
        return rows, "rows"  # a loss function that reduces by itself
    uses_sample_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
    if not masks and not uses_sample_weight:
        if values.shape[1:].is_fully_defined():
            return rows, "rows"
        return tf.size(values, out_type=tf.int64), ("values", id(values))
    kind = (reduction, tuple(id(mask) for mask in masks), uses_sample_weight and id(sample_weight))
    mask = None
    for part in masks:
        mask = part if mask is None else tf.logical_and(mask, part)
    if reduction != "mean_with_sample_weight":
        # Keras scales by prod(shape(mask)) / sum(mask) and divides by prod(shape(values)).
        per_entry = tf.size(values, tf.int64) / tf.size(mask, tf.int64)
        return tf.math.count_nonzero(mask, dtype=tf.float64) * per_entry, kind
    weight = None if mask is None else tf.cast(mask, tf.float64)
    if uses_sample_weight:
        sample_weight = tf.cast(sample_weight, tf.float64)
        if weight is None:
            weight = sample_weight
        else:
            weight, sample_weight = _same_rank(weight, sample_weight)
            weight = weight * sample_weight
    return tf.reduce_sum(weight), kind


def _same_rank(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Give the mask (rows, positions) and sample weights of rank one or two the same rank."""
    if a.shape.rank == b.shape.rank + 1 and a.shape[-1] == 1:
        return (a, b[:, tf.newaxis]) if b.shape.rank == 1 else (tf.squeeze(a, -1), b)
    if b.shape.rank == a.shape.rank + 1 and b.shape[-1] == 1:
        return (a[:, tf.newaxis], b) if a.shape.rank == 1 else (a, tf.squeeze(b, -1))
    return a, b
