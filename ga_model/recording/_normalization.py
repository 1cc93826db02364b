"""The running averages of BatchNormalization, updated from the statistics of all samples.

The layer computes mean and variance of each microbatch, normalizes by them, and moves its running
averages. While microbatches run, an attribute of each such layer stands in front of the method that
computes them, and tells a listener. It puts back what the layer has written, and what it has heard
of is pooled over microbatches: see `sums._moments`. Then the averages move once, as those of the
full batch.

What each call of a layer computes is pooled with that of the same call in other microbatches, so a
layer that a step calls twice moves twice, as in plain Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ga_model.base._context import graph_being_made
from ga_model.base._identity import is_in, unique
from ga_model.base._internals import move_renormalization, raw, reduction_axes, stateless_scope
from ga_model.base._internals_tf import unseen_by_tapes
from ga_model.hearing._moments_heard import listener, telling
from ga_model.reading._writes import handles_of, left_out, written_by_functions
from ga_model.replicas import _strategy
from ga_model.sums._moments import Moments

_STATISTICS = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


class Call(NamedTuple):
    """A call of a BatchNormalization layer in training.

    Attributes:
        layer: the layer.
        number: how many calls of the layer the step has made before.
        epsilon: what the layer adds to the number of values where it divides by that.
    """

    layer: Any
    number: int
    epsilon: float

    @property
    def key(self) -> tuple[int, int]:
        """What tells calls of one step apart."""
        return id(self.layer), self.number

    def move(self, moments: Moments) -> None:
        """Move the running averages as the layer does, if there are any values."""

        def move() -> None:
            layer = self.layer
            mean, variance = moments.averages(self.epsilon)
            if getattr(layer, "renorm", False):
                move_renormalization(layer, mean, variance)
                return
            pairs = (layer.moving_mean, mean), (layer.moving_variance, variance)
            for variable, value in pairs:
                before = tf.cast(variable, value.dtype)
                variable.assign(before * layer.momentum + value * (1.0 - layer.momentum))

        _strategy.run_if(moments.parts > 0, move)


class Listener:
    """Hears what BatchNormalization layers compute in one microbatch.

    A call inside a branch, a loop or a function is not heard, as its values stay there. The
    layer then moves its averages itself.
    """

    def __init__(self) -> None:
        self._graph = graph_being_made()
        self._scope = stateless_scope()
        self._heard: list[tuple[Call, Moments]] = []
        self._before: list[tuple[Any, Any, Any]] = []  # layer, variable, value
        self._lost: list[Any] = []
        self._written: set[int] | None = None
        self._unseen: Any = None  # operations whose writes are put back
        self._first = 0 if self._graph is None else len(self._graph.get_operations())

    def hear(self, layer: Any, inputs: Any, mask: Any, mean: Any, variance: Any) -> None:
        """Note what a layer has computed of its inputs, before it moves its averages."""
        if stateless_scope() is not self._scope:
            return  # which keeps the averages from moving
        if graph_being_made() is not self._graph:
            self._lost.append(layer)
            return
        self._unseen = left_out.get()
        with unseen_by_tapes():
            if not is_in(layer, [other for other, _, _ in self._before]):
                self._before += [(layer, v, tf.identity(raw(v))) for v in _statistics(layer)]
            epsilon = 0.0 if mask is None else keras.config.epsilon()
            shape = layer.moving_mean.shape  # Keras squeezes a single channel
            mean, variance = (tf.reshape(value, shape) for value in (mean, variance))
            count = _count(layer, inputs, mask)
            self.add(layer, epsilon, Moments.of(count, mean, variance, epsilon))

    def add(self, layer: Any, epsilon: float, moments: Moments) -> None:
        """Note the moments of a call that has left the running averages as they were."""
        number = sum(call.layer is layer for call, _ in self._heard)
        self._heard.append((Call(layer, number, epsilon), moments))

    def is_pooled(self, layer: Any) -> bool:
        """Return whether all calls of a layer were heard."""
        is_heard = is_in(layer, [call.layer for call, _ in self._heard])
        return is_heard and not (is_in(layer, self._lost) or self._is_called_unheard(layer))

    def _is_called_unheard(self, layer: Any) -> bool:
        """Return whether a function that was traced before moves the averages of a layer, too."""
        if self._graph is None or not is_in(layer, [other for other, _, _ in self._before]):
            return False
        if self._written is None:  # all has been called when this is first asked
            try:
                self._written = written_by_functions(self._graph, self._first, self._unseen)
            except Exception:  # of a graph that is not what it is taken for
                return True
        return any(self._written & handles_of(variable) for variable in _statistics(layer))

    def heard(self) -> tuple[list[Call], list[Moments]]:
        """Return the calls of layers of which all were heard, and their moments."""
        pairs = [(call, m) for call, m in self._heard if self.is_pooled(call.layer)]
        return [call for call, _ in pairs], [moments for _, moments in pairs]

    def put_back(self) -> None:
        """Let the running averages be as they were, where they are to be moved later."""
        for layer, variable, value in self._before:
            if self.is_pooled(layer):
                raw(variable).assign(value)


@contextlib.contextmanager
def listening(is_heard: bool = True) -> Iterator[Listener | None]:
    """Listen to a microbatch, and let it leave running averages as they are.

    Args:
        is_heard: False for one of which the averages move as they do.
    """
    hears = Listener() if is_heard else None
    with listener.set(hears):
        try:
            yield hears
        finally:
            if hears is not None:
                hears.put_back()


def heard_layers(model: Any) -> Any:
    """Return the context in which BatchNormalization layers tell what they compute."""
    return telling(model._accumulation.layers_before())


def names_by_fate(layers: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Return the names of layers whose averages the listener moves later, and those of others."""
    names: tuple[list[str], list[str]] = ([], [])
    hears = listener.get()
    for layer in layers:
        names[hears is None or not hears.is_pooled(layer)].append(layer.name)
    return names


def pass_on(calls: Iterable[Call], moments: Iterable[Moments]) -> None:
    """Tell the listener what calls gave for all samples of a batch, or move their averages."""
    for call, pooled in zip(calls, moments):
        if (hears := listener.get()) is not None:
            hears.add(call.layer, call.epsilon, pooled)
        else:
            call.move(pooled)


def in_order(calls: list[Call], found: list[Call], moments: list[Moments]) -> list[Moments] | None:
    """Return the moments of `found` in the order of `calls`, those of nothing where one is missing.

    Returns None if there are others, as there may be in eager mode.
    """
    given = {call.key: pooled for call, pooled in zip(found, moments)}
    if not given.keys() <= {call.key for call in calls}:
        return None
    return [given[c.key] if c.key in given else _nothing(c.layer) for c in calls]


def _nothing(layer: Any) -> Moments:
    zero, shape = tf.zeros((), tf.float64), layer.moving_mean.shape
    dtype = keras.backend.result_type(layer.compute_dtype, "float32")
    return Moments(zero, zero, tf.zeros(shape, dtype), tf.zeros(shape, dtype))


def _statistics(layer: Any) -> list[Any]:
    return unique(getattr(layer, name) for name in _STATISTICS if hasattr(layer, name))


def _count(layer: Any, inputs: Any, mask: Any) -> Any:
    """Return the number of values per channel that a layer averages over, as float64."""
    axes, shape = reduction_axes(layer), tf.shape(inputs, out_type=tf.int64)
    if mask is None:
        count = tf.cast(tf.reduce_prod(tf.gather(shape, axes)), tf.float64)
        return _strategy.sum_over_replicas([count])[0] if layer.synchronized else count
    mask = tf.cast(mask, tf.bool)
    if len(inputs.shape) - 1 not in axes:  # the channels have one mask
        count = tf.math.count_nonzero(tf.broadcast_to(mask, shape[:-1]))
    else:
        mask = tf.broadcast_to(mask[..., tf.newaxis], shape)
        count = tf.math.count_nonzero(mask, axis=axes)
    return tf.cast(count, tf.float64)
