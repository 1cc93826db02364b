"""What the benchmark asks of the backend that Keras runs on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras


def repeated(samples: tuple[Any, Any]) -> Any:
    """Return what a model's train function takes, to train on the same batch again and again."""
    if keras.backend.backend() == "torch":
        return [keras.tree.map_structure(keras.ops.convert_to_tensor, samples)]
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(samples)
    batches = batches.batch(len(samples[1]), drop_remainder=True)  # all of one known size
    return iter(batches.cache().repeat())


def gradient_function(model: Any) -> Callable[[Any], Any]:
    """Return Keras's train function around a batch's loss and gradients, with nothing after."""
    is_on_torch = keras.backend.backend() == "torch"
    model.train_step = (_gradients_on_torch if is_on_torch else _gradients_on_tensorflow)(model)
    model.make_train_function(force=True)
    return model.train_function  # type: ignore[no-any-return]


def _gradients_on_torch(model: Any) -> Callable[[Any], Any]:
    def train_step(data: Any) -> Any:
        x, y = data
        model.zero_grad()
        loss = model.compute_loss(x, y, model(x, training=True), training=True)
        loss.backward()
        return {"loss": loss.detach()}

    return train_step


def _gradients_on_tensorflow(model: Any) -> Callable[[Any], Any]:
    import tensorflow as tf

    def train_step(data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), training=True)
        gradients = tape.gradient(loss, model.trainable_variables)
        results = [loss, *tf.nest.flatten(gradients, expand_composites=True)]
        # Returned as logs, or they would not be computed.
        return {str(i): result for i, result in enumerate(results)}

    return train_step


def loop_by_hand(model: Any, num_microbatches: int) -> Callable[[Any], Any]:
    """Return Keras's train function around the two steps that a loop of one's own would have.

    One adds up gradients. The other, of the last microbatch of a window, updates with their mean.
    On TensorFlow each has a function of its own.
    """
    if keras.backend.backend() == "torch":
        add, update = _by_hand_on_torch(model, num_microbatches)
        steps = itertools.cycle([add] * (num_microbatches - 1) + [update])
        model.train_step = lambda data: next(steps)(data)
        model.make_train_function(force=True)
        return model.train_function  # type: ignore[no-any-return]
    functions = []
    for step in _by_hand_on_tensorflow(model, num_microbatches):
        model.train_step = step
        model.make_train_function(force=True)
        functions.append(model.train_function)
    add, update = functions
    turns = itertools.cycle([add] * (num_microbatches - 1) + [update])
    return lambda batches: next(turns)(batches)


def _by_hand_on_torch(model: Any, num_microbatches: int) -> Sequence[Callable[[Any], Any]]:
    import torch

    variables = model.trainable_variables

    def add(data: Any) -> Any:
        x, y = data
        y_pred = model(x, training=True)
        loss = model.compute_loss(x, y, y_pred, training=True)
        model.metrics[0].update_state(loss.detach(), sample_weight=len(y))
        (loss / num_microbatches).backward()
        return model.compute_metrics(x, y, y_pred)

    def update(data: Any) -> Any:
        logs = add(data)
        with torch.no_grad():
            model.optimizer.apply([v.value.grad for v in variables], variables)
        model.zero_grad()
        return logs

    return add, update


def _by_hand_on_tensorflow(model: Any, num_microbatches: int) -> Sequence[Callable[[Any], Any]]:
    import tensorflow as tf

    variables = model.trainable_variables
    sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]

    def gradients(data: Any) -> tuple[Any, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = model.compute_loss(x, y, y_pred, training=True)
        model.metrics[0].update_state(loss, sample_weight=tf.shape(y)[0])
        return tape.gradient(loss, variables), model.compute_metrics(x, y, y_pred)

    def add(data: Any) -> Any:
        found, logs = gradients(data)
        for total, gradient in zip(sums, found):
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            (total.scatter_add if is_sparse else total.assign_add)(gradient)
        return logs

    def update(data: Any) -> Any:
        found, logs = gradients(data)
        means = [(total + gradient) / num_microbatches for total, gradient in zip(sums, found)]
        model.optimizer.apply(means, variables)
        for total in sums:
            total.assign(tf.zeros_like(total))
        return logs

    return add, update
