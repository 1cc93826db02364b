"""Find out what a model gives for a batch, without computing it."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ga_model.base._internals import takes_training
from ga_model.hearing._models import unpack, unrecorded


def has_axis_of_samples(model: Any, data: Any) -> bool:
    """Return whether an output has an axis beside the first whose length is the number of samples.

    Of axes whose length is not known, those of 3 samples are known then.
    """
    rows = 3

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return leaf
        return tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype)

    def call(x: Any) -> list[Any]:
        with keras.StatelessScope(), unrecorded():
            outputs = model(x, training=True) if takes_training(model) else model(x)
        return [leaf for leaf in tf.nest.flatten(outputs) if leaf is not None]

    specs = tf.nest.map_structure(spec, unpack(data)[0])
    outputs = tf.function(call, autograph=False).get_concrete_function(specs).structured_outputs
    return any(output.shape.rank and rows in output.shape[1:] for output in outputs)
