"""The running averages of BatchNormalization, updated from the statistics of all samples.

As on TensorFlow (`recording/_normalization.py`): while a microbatch is traced, a function stands in
front of the method that computes mean and variance, and notes them. What the layer writes is left
out, what was noted is pooled over microbatches, and the averages move once per update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from ga_model.base._internals import (
    move_renormalization,
    reduction_axes,
    stateless_scope,
    value_in,
)
from ga_model.hearing._moments_heard import listener, telling


class Moments(NamedTuple):
    """Mean and variance of the values that have come so far, pooled as in `sums/_moments.py`.

    Attributes:
        count: values per channel, a scalar or a vector.
        mean, variance: vectors.
    """

    count: Any
    mean: Any
    variance: Any

    @classmethod
    def of_stacked(cls, parts: Moments) -> Moments:
        """Return the moments of all parts, which are stacked on a first axis."""
        count = parts.count.sum(0)
        shares = jnp.where(count > 0, parts.count / jnp.maximum(count, 1), 0)
        shares = shares.reshape(*shares.shape, *[1] * (parts.mean.ndim - shares.ndim))
        mean = (shares * parts.mean).sum(0)
        variance = (shares * (parts.variance + jnp.square(parts.mean - mean))).sum(0)
        return cls(count, mean, variance)

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both."""
        count = self.count + other.count
        share = jnp.where(count > 0, other.count / jnp.maximum(count, 1), 0)
        step = other.mean - self.mean
        between = step * share * step * (1.0 - share)
        variance = self.variance * (1.0 - share) + other.variance * share + between
        return Moments(count, self.mean + step * share, variance)


class Call(NamedTuple):
    """A call of a layer in training.

    Attributes:
        layer: the layer.
        epsilon: what the layer adds to the number of values where it divides by that.
    """

    layer: Any
    epsilon: float

    def move(self, moments: Moments) -> None:
        """Move the running averages as the layer does, if there are any values."""
        layer, epsilon = self.layer, self.epsilon
        mean, variance = moments.mean, moments.variance
        if epsilon:
            share = moments.count / (moments.count + epsilon)
            mean = mean * share
            variance = (variance + jnp.square(moments.mean - mean)) * share
        scope = stateless_scope()
        before = [value_in(scope, v) for v in layer.non_trainable_variables]
        if getattr(layer, "renorm", False):
            move_renormalization(layer, mean, variance)
        else:
            for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
                moved = jnp.asarray(variable, value.dtype) * layer.momentum
                variable.assign(moved + value * (1.0 - layer.momentum))
        if not epsilon:
            is_any = jnp.any(moments.count > 0)
            for variable, value in zip(layer.non_trainable_variables, before):
                variable.assign(jnp.where(is_any, value_in(scope, variable), value))


class Listener:
    """Notes what layers compute while a microbatch is traced.

    Attributes:
        calls: the calls.
        moments: what they have computed.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.moments: list[Moments] = []

    def hear(self, layer: Any, inputs: Any, mask: Any, mean: Any, variance: Any) -> None:
        """Note what a layer has computed of its inputs."""
        epsilon = 0.0 if mask is None else keras.config.epsilon()
        shape = tuple(layer.moving_mean.shape)
        mean, variance = (jax.lax.stop_gradient(v).reshape(shape) for v in (mean, variance))
        count = _count(layer, inputs, mask)
        if epsilon:  # of a mean over the values without it
            is_any = count > 0
            growth = jnp.where(is_any, (count + epsilon) / jnp.where(is_any, count, 1), 0)
            exact = mean * growth
            mean, variance = exact, variance * growth - jnp.square(exact - mean)
        self.calls.append(Call(layer, epsilon))
        self.moments.append(Moments(count, mean, variance))

    def written(self) -> set[int]:
        """Return the ids of the variables of the layers that were heard."""
        return {id(v) for call in self.calls for v in call.layer.non_trainable_variables}


@contextmanager
def listening(layers: Sequence[Any]) -> Iterator[Listener]:
    """Listen to a microbatch."""
    hears = Listener()
    with listener.set(hears), telling(layers):
        yield hears


def _count(layer: Any, inputs: Any, mask: Any) -> Any:
    """Return the number of values per channel that a layer averages over."""
    axes = reduction_axes(layer)
    dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    if mask is None:
        return jnp.asarray(math.prod(inputs.shape[axis] for axis in axes), dtype)
    if inputs.ndim - 1 not in axes:  # the channels have one mask
        return jnp.broadcast_to(mask, inputs.shape[:-1]).astype(dtype).sum()
    return jnp.broadcast_to(mask[..., None], inputs.shape).astype(dtype).sum(axis=tuple(axes))
