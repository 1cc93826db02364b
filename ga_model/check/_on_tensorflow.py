"""What the check needs from TensorFlow. `_on_torch` has the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ga_model.base._internals import mask_of, set_mask
from ga_model.check._all_variables import AllVariables

__all__ = ["AllVariables"]

# Where rounding hides everything else.
MORE_EXACT = (
    "Check in float64: `keras.config.set_floatx('float64')`, "
    "`keras.config.set_dtype_policy('float64')`, and create the model again."
)


def scope(model: Any) -> Any:
    """Return the scope in which a model was made."""
    return model.distribute_strategy.scope()


def trains_alone(model: Any) -> bool:
    """Return whether one device trains a model."""
    with scope(model):
        return int(tf.distribute.get_strategy().num_replicas_in_sync) == 1


def part_of(array: Any, begin: int, end: int) -> Any:
    """Return the samples of an array from `begin` up to `end`."""
    if isinstance(array, tf.SparseTensor):
        rest = [0] * (array.shape.rank - 1)
        return tf.sparse.slice(array, [begin, *rest], [end - begin, *array.shape[1:]])
    return None if array is None else array[begin:end]


def as_tensor(array: Any) -> Any:
    """Return what Keras makes of an array: floating-point numbers have its `floatx`."""
    if array is None or isinstance(array, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return array
    array = np.asarray(array)
    dtype = keras.config.floatx() if array.dtype.kind == "f" else array.dtype
    return tf.convert_to_tensor(array.astype(dtype))


def build(model: Any, data: Any) -> bool:
    """Make variables without a step of training, and return whether all are that it uses.

    Eagerly that is known of the model's own optimizer only.
    """
    if not model.run_eagerly:
        strategy = model.distribute_strategy

        def step(data: Any) -> Any:
            return strategy.run(model.train_step, args=(data,))

        whole = keras.utils.pack_x_y_sample_weight(*data)
        tf.function(step, autograph=False).get_concrete_function(whole)
        return True
    if not model.built:
        with contextlib.suppress(NotImplementedError):  # of a model that has no `call`
            model(data[0])
    if model.optimizer is not None and model.built and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return False


def gradients(loss_of: Callable[[Any], Any], outputs: Any) -> list[Any]:
    """Return the gradients of a loss with respect to outputs, each a tensor or None.

    Args:
        loss_of: takes the outputs.
        outputs: a nest of tensors.
    """
    with tf.GradientTape() as tape:
        # A copy: Keras's losses go past the outputs of a softmax to what went into it.
        outputs = keras.tree.map_structure(_copy, outputs)
        tape.watch(outputs)
        loss = loss_of(outputs)
    return list(tape.gradient(loss, keras.tree.flatten(outputs)))


def _copy(output: Any) -> Any:
    copy = tf.identity(output)
    if (mask := mask_of(output)) is not None:
        set_mask(copy, mask)
    return copy


def value_of(variable: Any) -> Any:
    """Return the value of a variable, which does not change with it."""
    return variable.numpy()


def random_state() -> Any:
    """Return the state of random numbers that no variable has: of a graph there is none."""
    return None


def set_random_state(state: Any) -> None:
    """Put it back."""
