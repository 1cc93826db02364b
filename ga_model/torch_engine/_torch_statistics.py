"""The running averages of BatchNormalization, updated from the statistics of all samples.

As on TensorFlow (`recording/_normalization.py`): while microbatches run, a function stands in front
of the method that computes mean and variance, and tells a listener. What the layer has written is
put back, what was heard is pooled, and the averages move once per update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import torch

from ga_model.base._internals import move_renormalization, raw, reduction_axes
from ga_model.hearing._moments_heard import listener


class Moments(NamedTuple):
    """Mean and variance of the values that have come so far, pooled as in `sums/_moments.py`.

    Attributes:
        count: values per channel, a float64 scalar tensor or vector.
        mean, variance: vectors.
    """

    count: Any
    mean: Any
    variance: Any

    def plus(self, other: Moments) -> Moments:
        """Return the moments of both."""
        count = self.count + other.count
        share = torch.where(count > 0, other.count / count.clamp(min=1.0), 0.0).to(self.mean.dtype)
        step = other.mean - self.mean
        between = step * share * step * (1.0 - share)
        variance = self.variance * (1.0 - share) + other.variance * share + between

        def of(both: Any, own: Any, others: Any) -> Any:
            # Those of no values may be NaN, and are left out.
            return torch.where(other.count > 0, torch.where(self.count > 0, both, others), own)

        mean = of(self.mean + step * share, self.mean, other.mean)
        return Moments(count, mean, of(variance, self.variance, other.variance))


class Call(NamedTuple):
    """A call of a layer in training, and what it has computed.

    Attributes:
        layer: the layer.
        epsilon: what the layer adds to the number of values where it divides by that.
        moments: of the values.
    """

    layer: Any
    epsilon: float
    moments: Moments

    def move(self) -> None:
        """Move the running averages as the layer does, if there are any values."""
        layer, moments, epsilon = self.layer, self.moments, self.epsilon
        if not bool((moments.count > 0).any()) and not epsilon:
            return
        mean, variance = moments.mean, moments.variance
        if epsilon:
            share = (moments.count / (moments.count + epsilon)).to(mean.dtype)
            mean = mean * share
            variance = (variance + torch.square(moments.mean - mean)) * share
        if getattr(layer, "renorm", False):
            move_renormalization(layer, mean, variance)
            return
        for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
            before = raw(variable).to(value.dtype)
            variable.assign(before * layer.momentum + value * (1.0 - layer.momentum))


class Statistics:
    """What the layers have computed of all microbatches so far, call by call."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], Call] = {}

    def add(self, heard: list[Call]) -> None:
        """Add what a microbatch has computed."""
        numbers: dict[int, int] = {}
        for call in heard:
            number = numbers[id(call.layer)] = numbers.get(id(call.layer), 0) + 1
            key = id(call.layer), number
            if key in self._calls:
                call = call._replace(moments=self._calls[key].moments.plus(call.moments))
            self._calls[key] = call

    def copy(self) -> Statistics:
        copy = Statistics()
        copy._calls = dict(self._calls)
        return copy

    def calls(self) -> list[Call]:
        """Return the calls, pooled."""
        return list(self._calls.values())

    def move(self) -> None:
        """Move the running averages, or tell the listener of the microbatch that has all of it."""
        with torch.no_grad():
            for call in self._calls.values():
                if (hears := listener.get()) is not None:
                    hears.heard.append(call)
                else:
                    call.move()


class Listener:
    """Hears what layers compute in one microbatch.

    Attributes:
        heard: the calls.
    """

    def __init__(self) -> None:
        self.heard: list[Call] = []
        self._before: dict[int, tuple[Any, Any]] = {}

    def hear(self, layer: Any, inputs: Any, mask: Any, mean: Any, variance: Any) -> None:
        """Note what a layer has computed of its inputs, before it moves its averages."""
        with torch.no_grad():
            for variable in layer.non_trainable_variables:
                value = raw(variable)
                self._before.setdefault(id(variable), (variable, value.detach().clone()))
            epsilon = 0.0 if mask is None else keras.config.epsilon()
            shape = tuple(layer.moving_mean.shape)
            mean, variance = (value.detach().reshape(shape) for value in (mean, variance))
            count = _count(layer, inputs, mask)
            if epsilon:  # of a mean over the values without it
                growth = torch.where(count > 0, (count + epsilon) / count.clamp(min=1.0), 0.0)
                growth = growth.to(mean.dtype)
                exact = mean * growth
                mean, variance = exact, variance * growth - torch.square(exact - mean)
            self.heard.append(Call(layer, epsilon, Moments(count, mean, variance)))

    def put_back(self) -> None:
        """Let the running averages be as they were."""
        with torch.no_grad():
            for variable, value in self._before.values():
                raw(variable).copy_(value)


@contextlib.contextmanager
def listening() -> Iterator[Listener]:
    """Listen to a microbatch, and let it leave running averages as they are."""
    hears = Listener()
    with listener.set(hears):
        try:
            yield hears
        finally:
            hears.put_back()


def _count(layer: Any, inputs: Any, mask: Any) -> Any:
    """Return the number of values per channel that a layer averages over, as float64."""
    axes = reduction_axes(layer)
    if mask is None:
        count = math.prod(inputs.shape[axis] for axis in axes)
        return torch.tensor(float(count), dtype=torch.float64, device=inputs.device)
    if len(inputs.shape) - 1 not in axes:  # the channels have one mask
        return torch.broadcast_to(mask, inputs.shape[:-1]).double().sum()
    return torch.broadcast_to(mask[..., None], inputs.shape).double().sum(dim=axes)
