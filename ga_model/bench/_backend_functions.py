"""What the benchmark asks of the backend that Keras runs on."""

from __future__ import annotations

from collections.abc import Callable
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
