"""Update the running averages of BatchNormalization from the statistics of all samples.

While a microbatch runs, a patch records the mean and variance that a layer computes. Its writes are
undone, the moments are pooled over microbatches, and the averages move once per update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
from keras import ops

from ga_model.base import _numbers
from ga_model.base._context import ThreadValue
from ga_model.base._internals import MOMENTS, copy_of, move_renormalization, reduction_axes
from ga_model.base._method_patch import MethodPatch
from ga_model.base._types import Tensor

# The `MomentsRecorder` of the microbatch that this thread runs, or None.
current_recorder: ThreadValue = ThreadValue()


class Moments(NamedTuple):
    """Mean and variance of values. Chan's formula pools those of several microbatches.

    T. F. Chan, G. H. Golub, R. J. LeVeque: Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances. Stanford, STAN-CS-79-773, 1979.

    Attributes:
        count: values per channel, a scalar or a vector.
        mean, variance: vectors.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of_stacked(cls, parts: Moments) -> Moments:
        """Return the pooled moments of parts that are stacked on a first axis."""
        count = ops.sum(parts.count, axis=0)
        shares = _numbers.divide_or_zero(parts.count, count)
        missing = len(parts.mean.shape) - len(shares.shape)
        shares = ops.reshape(shares, (*shares.shape, *[1] * missing))
        mean = ops.sum(shares * parts.mean, axis=0)
        between = ops.square(parts.mean - mean)
        return cls(count, mean, ops.sum(shares * (parts.variance + between), axis=0))

    def plus(self, other: Moments) -> Moments:
        """Return the pooled moments of both."""
        count = self.count + other.count
        share = _numbers.divide_or_zero(other.count, count)
        step = other.mean - self.mean
        between = step * share * step * (1.0 - share)
        variance = self.variance * (1.0 - share) + other.variance * share + between
        return Moments(count, self.mean + step * share, variance)


class Call(NamedTuple):
    """A call of a BatchNormalization layer in training mode.

    Attributes:
        layer: the layer.
        epsilon: what the layer adds to the number of values that it divides by.
    """

    layer: keras.Layer
    epsilon: float

    def move(self, moments: Moments) -> None:
        """Move the running averages as the layer does, unless there are no values."""
        layer, epsilon = self.layer, self.epsilon
        mean, variance = moments.mean, moments.variance
        if epsilon:
            share = moments.count / (moments.count + epsilon)
            mean = mean * share
            variance = (variance + ops.square(moments.mean - mean)) * share
        before = [copy_of(v) for v in layer.non_trainable_variables]
        if getattr(layer, "renorm", False):
            move_renormalization(layer, mean, variance)
        else:
            for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
                moved = ops.cast(copy_of(variable), value.dtype) * layer.momentum
                variable.assign(moved + value * (1.0 - layer.momentum))
        if not epsilon:
            is_any = ops.any(moments.count > 0)
            for variable, value in zip(layer.non_trainable_variables, before):
                variable.assign(_numbers.where(is_any, copy_of(variable), value))


class MomentsRecorder:
    """Records the moments that layers compute in a microbatch.

    Args:
        place: returns the scope of the running code: the step, or a function or branch in it.
        layers: BatchNormalization layers whose averages `restore` restores.

    Attributes:
        calls: the calls, in order.
        moments: moments of each call.
    """

    def __init__(self, place: Callable[[], Any], layers: Sequence[keras.Layer] = ()) -> None:
        self.calls: list[Call] = []
        self.moments: list[Moments] = []
        self._place, self._step_place = place, place()
        state = [v for layer in layers for v in layer.non_trainable_variables]
        self._before = [(variable, copy_of(variable)) for variable in state]

    def record(
        self,
        layer: keras.Layer,
        inputs: Tensor,
        mask: Tensor | None,
        mean: Tensor,
        variance: Tensor,
    ) -> None:
        """Record the moments of a layer's inputs, unless they are tensors of an inner scope."""
        if self._place() is not self._step_place:
            return
        epsilon = 0.0 if mask is None else keras.config.epsilon()
        shape = tuple(layer.moving_mean.shape)
        mean, variance = (ops.reshape(ops.stop_gradient(v), shape) for v in (mean, variance))
        count = _count(layer, inputs, mask)
        if epsilon:  # undo its effect on the mean
            growth = _numbers.divide_or_zero(count + epsilon, count)
            exact = mean * growth
            mean, variance = exact, variance * growth - ops.square(exact - mean)
        self.calls.append(Call(layer, epsilon))
        self.moments.append(Moments(count, mean, variance))

    def restore(self) -> None:
        """Restore the running averages of the layers that were called."""
        written = self.written()
        for variable, value in self._before:
            if id(variable) in written:
                variable.assign(value)

    def written(self) -> set[int]:
        """Return the ids of the variables of the layers that were called."""
        return {id(v) for call in self.calls for v in call.layer.non_trainable_variables}


def is_known(layer: keras.Layer) -> bool:
    """Return whether a layer updates its averages as BatchNormalization does."""
    normal = keras.layers.BatchNormalization
    return isinstance(layer, normal) and type(layer).call is normal.call


def passing_moments(layers: Iterable[keras.Layer]) -> AbstractContextManager[None]:
    """Return a context in which layers with known updates record their moments."""
    return _moments.of(layer for layer in layers if is_known(layer))


def _passing_on(
    layer: keras.Layer, moments: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mean, variance = moments(inputs, mask)
        if (recorder := current_recorder.get()) is not None:
            recorder.record(layer, inputs, mask, mean, variance)
        return mean, variance

    return run


_moments = MethodPatch(MOMENTS, _passing_on)


def _count(layer: keras.Layer, inputs: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of values per channel that a layer averages over."""
    axes, shape = reduction_axes(layer), ops.shape(inputs)
    dtype = _numbers.sum_dtype(inputs.dtype)
    if mask is None:
        return ops.cast(math.prod(shape[axis] for axis in axes), dtype)
    if len(shape) - 1 not in axes:  # all channels share one mask
        return ops.sum(ops.cast(ops.broadcast_to(mask, shape[:-1]), dtype))
    return ops.sum(ops.cast(ops.broadcast_to(mask[..., None], shape), dtype), axis=tuple(axes))
