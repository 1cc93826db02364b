"""Test by trial whether a loss adds up over samples, and whether a model treats them separately.

There is no graph to be read before a step runs. So a loss is computed on a microbatch and on its
halves: of a mean over samples, or a sum, the gradients of the halves are those of the whole, but
for a factor that tells which, or the numbers that the loss is divided by (`_divisors`). Likewise a
model is called on a microbatch and on its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

import keras
import torch

from ga_model.base._internals import layers_in, raw, seeds, takes_training
from ga_model.hearing._models import unrecorded
from ga_model.hearing._split import num_rows, part_of
from ga_model.torch_engine._autograd import unheard
from ga_model.torch_engine._divisors import Tried, Watch, divisors_of
from ga_model.torch_engine._not_known import otherwise
from ga_model.torch_engine._state import unchanged
from ga_model.torch_engine._zero_weights import exchanged, floats_in

_TOLERANCE = {torch.float16: 5e-2, torch.bfloat16: 5e-2}  # elsewhere as below
_OF_LOSSES = 2e-5  # of few operations: a sum over the number of samples + 1e-3 is no mean
_OF_MODELS = 1e-3  # of many, which may round otherwise for another number of samples


class DoesNotAddUpError(ValueError):
    """What a step computes does not add up over microbatches. The text says what, and what to do.

    It is raised before anything of the batch has been updated.
    """


@otherwise("other")
def kind_of_loss(
    compute: Callable[[Any, Any], Any], dtype: Any, y_true: Any, y_pred: Any, watch: Watch
) -> Any:
    """Return what a loss is over samples: "rows", "mean", "sum", `Divided` or "other".

    With "rows" it gives a value for each, else one number. None where the samples do not tell:
    there is one, or no gradient.

    Args:
        compute: takes y_true and y_pred, and returns values or a number.
        dtype: that both are converted to first, or None.
        y_true, y_pred: nests of tensors.
        watch: what was tried of it before.
    """
    rows = num_rows(y_pred)
    if rows < 2:
        return None
    y_true, y_pred = (
        keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=dtype), y)
        for y in (y_true, y_pred)
    )
    y_pred = apart(detached(y_pred))
    half = rows // 2
    shares = [(0, rows), (0, half), (half, rows)]
    parts = [_gradients(compute, part_of(y_true, *s), part_of(y_pred, *s), s, rows) for s in shares]
    whole, first, second = parts
    if whole is None or first is None or second is None:
        return "other"
    tried = Tried(whole.divisors, first.divisors, second.divisors, rows)
    if not any(bool(g.any()) for g in whole.gradients) or not all(map(_is_finite, whole.gradients)):
        return watch.kind_without_gradient(tried) if whole.is_number else None

    def fits(factors: list[float]) -> bool:
        joined = zip(first.gradients, second.gradients)
        halves = [torch.cat([_times(a, factors[0]), _times(b, factors[1])]) for a, b in joined]
        return all(is_close(g, h, _OF_LOSSES) for g, h in zip(whole.gradients, halves))

    if not whole.is_number:
        return watch.note(tried, "rows" if fits([1.0, 1.0]) else "other")
    return watch.kind_of(fits, tried, rows, half)


def _is_finite(tensor: Any) -> bool:
    return bool(torch.isfinite(tensor).all())


def _times(gradient: Any, factor: float) -> Any:
    """Return a gradient times a number. One of which nothing counts may be NaN."""
    return gradient * factor if factor else torch.zeros_like(gradient)


def detached(data: Any) -> Any:
    """Return a nest without what it was computed from."""
    return keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x).detach(), data)


def joined(first: Any, second: Any) -> Any:
    """Return the samples of two nests in one. What has no samples is that of the second."""

    def together(a: Any, b: Any) -> Any:
        if not len(getattr(a, "shape", ())):
            return b
        a, b = detached(a), detached(b)
        return torch.cat([a if a.shape == b.shape else b, b])  # sequences have other lengths

    return keras.tree.map_structure(together, first, second)


def are_alike(data: Any) -> bool:
    """Return whether all samples of a nest are the same."""
    leaves = [keras.ops.convert_to_tensor(leaf) for leaf in keras.tree.flatten(data)]
    return all(map(_is_alike, leaves))


def apart(data: Any) -> Any:
    """Return a nest whose samples differ: floats that are alike in all samples are scattered.

    What lies between 0 and 1 still does.
    """
    generator = torch.Generator().manual_seed(0)

    def scattered(leaf: Any) -> Any:
        leaf = keras.ops.convert_to_tensor(leaf)
        if leaf.ndim == 0 or not (leaf.is_floating_point() and _is_alike(leaf)):
            return leaf
        shares = torch.rand(leaf.shape, generator=generator).to(leaf.device, leaf.dtype)
        return leaf * (1.0 - 0.2 * shares) + 0.1 * shares

    return keras.tree.map_structure(scattered, data)


def _is_alike(tensor: Any) -> bool:
    return tensor.ndim == 0 or bool((tensor == tensor[:1]).all())


class _Found(NamedTuple):
    """What a loss gives for some samples.

    Attributes:
        is_number: whether it is one number for all of them.
        gradients: with respect to predictions.
        divisors: of it.
    """

    is_number: bool
    gradients: list[Any]
    divisors: list[float]


def _gradients(
    compute: Callable[[Any, Any], Any], y_true: Any, y_pred: Any, share: tuple[int, int], rows: int
) -> _Found | None:
    y_pred = keras.tree.map_structure(lambda x: x.detach().requires_grad_(), y_pred)
    leaves = keras.tree.flatten(y_pred)
    with torch.enable_grad(), unrecorded(), unheard():
        values = keras.ops.convert_to_tensor(compute(y_true, y_pred))
        if values.ndim and values.shape[0] != share[1] - share[0]:
            return None
        if not values.requires_grad:
            return _Found(values.ndim == 0, [torch.zeros_like(leaf) for leaf in leaves], [])
        divisors = divisors_of(values)
        total = values
        if values.ndim:  # of unlike values, lest those of different samples stand for another
            factors = torch.arange(1, rows + 1, dtype=values.dtype, device=values.device)
            factors = factors[slice(*share)] / rows
            total = (values * factors.reshape(-1, *[1] * (values.ndim - 1))).sum()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    gradients = [torch.zeros_like(v) if g is None else g for g, v in zip(gradients, leaves)]
    return _Found(values.ndim == 0, gradients, divisors)


def rounding_in(layers: Iterable[Any], outputs: Any) -> float:
    """Return the relative error of the half precision that layers compute or give in, or 0.0."""
    dtypes = {layer.compute_dtype for layer in layers}
    dtypes |= {keras.backend.standardize_dtype(leaf.dtype) for leaf in keras.tree.flatten(outputs)}
    halves = (torch.float16, torch.bfloat16)
    found = (torch.finfo(d).eps for d in halves if keras.backend.standardize_dtype(d) in dtypes)
    return max(found, default=0.0) / 2


def is_close(one: Any, other: Any, tolerance: float = _OF_MODELS, rounded: Any = None) -> bool:
    """Return whether two tensors are the same but for rounding.

    Args:
        one, other: the tensors.
        tolerance: relative difference, in full precision.
        rounded: what the first one is with errors of rounding, where that tells the tolerance.
    """
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    tolerance = _TOLERANCE.get(one.dtype, tolerance)
    difference = torch.linalg.vector_norm((one - other).float())
    size = torch.linalg.vector_norm(one.float())
    if rounded is not None:
        noise = float(torch.linalg.vector_norm((one - rounded).float()) / size)
        least = max(_OF_MODELS, torch.finfo(one.dtype).eps)
        tolerance = min(max(least, noise), max(_TOLERANCE.values()))
    # What is not finite tells nothing of the samples.
    return bool(difference <= tolerance * size) or not bool(torch.isfinite(size))


class ModelProbe:
    """What a model is over samples.

    Args:
        model: the model.
        x: the inputs of a microbatch of two samples or more.
        takes_gradients: whether those of losses that layers add may be looked at.

    Attributes:
        mixes_samples: whether its outputs for a sample depend on the others.
        kinds: of each loss that its layers add, as `kind_of_addition` has it.
    """

    def __init__(self, model: Any, x: Any, takes_gradients: bool = False) -> None:
        x, rows = apart(x), num_rows(x)
        half = rows // 2
        has_normalization = bool(model._batch_normalization_layers())
        draws = any(seeds(layer) for layer in layers_in(model))
        self._training = not (has_normalization or draws)
        with unchanged(model):
            outputs, losses = self._call(model, x)
            shares = [(0, half), (half, rows)]
            parts = [self._call(model, part_of(x, *s)) for s in shares]
            rounded = None
            if error := rounding_in(layers_in(model), outputs):
                with exchanged(floats_in(model), error):
                    rounded, _ = self._call(model, x)
            self.mixes_samples = not is_whole_of(outputs, [o for o, _ in parts], rows, rounded)
            if self.mixes_samples:  # or draws numbers that nobody can tell of
                again, _ = self._call(model, x)
                pairs = zip(*(keras.tree.flatten(o) for o in (outputs, again)))
                self.mixes_samples = all(is_close(one, other) for one, other in pairs)
            if takes_gradients and not all(map(bool, losses)):
                losses, *others = (
                    self._call(model, part_of(x, *s), torch.enable_grad())[1]
                    for s in ((0, rows), *shares)
                )
                parts = [(None, found) for found in others]
        self.kinds = [
            kind_of_addition(value, a, b, half / rows)
            for value, a, b in zip(losses, parts[0][1], parts[1][1])
        ]

    def _call(self, model: Any, x: Any, context: Any = None) -> Any:
        weights = [raw(v) for v in model.trainable_weights]
        with context or torch.no_grad(), unrecorded():
            outputs = model(x, training=self._training) if takes_training(model) else model(x)
            return outputs, [told_by(loss, weights) for loss in model.losses]


def is_whole_of(outputs: Any, parts: list[Any], rows: int, rounded: Any = None) -> bool:
    """Return whether outputs for all samples are those for the parts, one behind the other.

    Args:
        outputs: for all samples.
        parts: for some of them each.
        rows: samples.
        rounded: outputs with errors of rounding, or None.
    """
    leaves = keras.tree.flatten(outputs)
    others = [None for _ in leaves] if rounded is None else keras.tree.flatten(rounded)
    for whole, other, *ones in zip(leaves, others, *map(keras.tree.flatten, parts)):
        if not whole.ndim or whole.shape[0] != rows:
            return False
        if any(not one.ndim or one.shape[1:] != whole.shape[1:] for one in ones):
            return False
        if not is_close(whole, torch.cat(ones), rounded=other):
            return False
    return True


def filled_in(kinds: list[str | None], others: list[str | None]) -> list[str | None]:
    """Return the kinds of losses that layers add, those of another trial where one is None."""
    return [other if kind is None else kind for kind, other in zip_longest(kinds, others)]


def kind_of_addition(whole: Any, first: Any, second: Any, share: float) -> str | None:
    """Return what a loss that a layer adds is over samples: "mean", "sum" or "other".

    None where it is zero, which does not tell.

    Args:
        whole, first, second: what `told_by` gives for some samples, and for two parts of them.
        share: of the samples that the first part has.
    """
    if any(part.ndim == 0 and part for part in (whole, first, second)):  # and some that are zero
        whole, first, second = (
            p if p.ndim == 0 else p.new_zeros(()) for p in (whole, first, second)
        )
    norm = torch.linalg.vector_norm
    size = 1e-3 * max(map(float, map(norm, (whole, first, second))))
    if not size:
        return None
    if float(norm(whole - share * first - (1.0 - share) * second)) <= size:
        return "mean"
    return "sum" if float(norm(whole - first - second)) <= size else "other"


def told_by(loss: Any, weights: list[Any]) -> Any:
    """Return what tells what a loss that a layer adds is over samples: its value, a scalar.

    Where that is zero, it is the gradient of weights, a vector, if there is one.

    Args:
        loss: of which the graph is there, if it has a gradient.
        weights: that it may follow from.
    """
    loss = keras.ops.convert_to_tensor(loss).sum()
    value = loss.detach().float()
    if bool(value) or not (loss.requires_grad and weights):
        return value
    with unheard():
        found = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
    gradients = [torch.zeros_like(w) if g is None else g for g, w in zip(found, weights)]
    return torch.cat([g.detach().float().ravel() for g in gradients])
