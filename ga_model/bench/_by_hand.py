"""Accumulation in a custom training loop, which is exact for full windows of equal batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import keras

from ga_model.base._types import Gradient, Nest, Scalar, Tensor


def loop_by_hand(
    model: keras.Model, num_microbatches: int
) -> Callable[[Iterable[tuple[Nest, Tensor]]], Scalar]:
    """Return a function that trains on the next batch, and updates at the end of each window."""
    is_on_torch = keras.backend.backend() == "torch"
    add, update = (_on_torch if is_on_torch else _on_tensorflow)(model, num_microbatches)
    turns = itertools.cycle([add] * (num_microbatches - 1) + [update])
    return lambda batches: next(turns)(*next(iter(batches)))


def _on_torch(
    model: keras.Model, num_microbatches: int
) -> Sequence[Callable[[Nest, Tensor], Scalar]]:
    """Return a step that accumulates gradients, and one that also updates with their mean."""
    import torch

    variables, tracker = model.trainable_variables, model.metrics[0]

    def add(x: Nest, y: Tensor) -> Scalar:
        loss = model.compute_loss(x, y, model(x, training=True), training=True)
        tracker.update_state(loss.detach(), sample_weight=len(y))
        (loss / num_microbatches).backward()
        return tracker.result()

    def update(x: Nest, y: Tensor) -> Scalar:
        logs = add(x, y)
        with torch.no_grad():
            model.optimizer.apply([v.value.grad for v in variables], variables)
        model.zero_grad()
        return logs

    return add, update


def _on_tensorflow(
    model: keras.Model, num_microbatches: int
) -> Sequence[Callable[[Nest, Tensor], Scalar]]:
    import tensorflow as tf

    variables, tracker = model.trainable_variables, model.metrics[0]
    sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]

    def gradients(x: Nest, y: Tensor) -> list[Gradient]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), training=True)
        tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        return tape.gradient(loss, variables)  # type: ignore[no-any-return]

    def add(x: Nest, y: Tensor) -> Scalar:
        for total, gradient in zip(sums, gradients(x, y)):
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            (total.scatter_add if is_sparse else total.assign_add)(gradient)
        return tracker.result()

    def update(x: Nest, y: Tensor) -> Scalar:
        last = gradients(x, y)
        means = [(total + gradient) / num_microbatches for total, gradient in zip(sums, last)]
        model.optimizer.apply(means, variables)
        for total in sums:
            total.assign(tf.zeros_like(total))
        return tracker.result()

    return [tf.function(step, jit_compile=model.jit_compile) for step in (add, update)]
