"""Memory of so many rows, which a layer takes, and what each backend raises where it fails."""

import keras
from keras import layers

from ga_model.base._python_state import inside_split_call
from ga_model.core.models import recording_of_thread

BACKEND = keras.backend.backend()

# Errors of failed allocations on a CPU.
if BACKEND == "tensorflow":
    import tensorflow as tf

    of_onednn = "Operation received an exception:Status: 1, message: could not create a primitive"
    ERRORS = [tf.errors.AbortedError(None, None, of_onednn), MemoryError()]
elif BACKEND == "jax":
    import jax

    text = "INTERNAL: Error dispatching computation: Out of memory allocating 595161284 bytes."
    ERRORS = [jax.errors.JaxRuntimeError(text), MemoryError()]
else:
    import torch

    text = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
    ERRORS = [RuntimeError(text), MemoryError()]


def out_of_memory(text):
    """Return the error of a failed allocation, on TensorFlow what becomes one in a graph."""
    if BACKEND == "jax":
        return jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")
    return torch.cuda.OutOfMemoryError(text) if BACKEND == "torch" else MemoryError(text)


class Memory:
    """Memory of so many rows.

    Attributes:
        limit: rows that fit.
        taken: rows of all microbatches, also of those that failed.
        drops: limits that hold from a number of microbatches on.
    """

    def __init__(self, limit=10**6):
        self.limit, self.taken, self.drops = limit, [], {}

    def drop_in(self, microbatches, limit):
        """Let less fit from the microbatch on that comes after so many others."""
        self.drops[len(self.taken) + microbatches] = limit

    def take(self, rows):
        self.limit = self.drops.pop(len(self.taken), self.limit)
        self.taken.append(rows)
        if rows > self.limit:
            raise out_of_memory("too many rows")
        return rows


def limited(memory):
    """Return a layer that hands on what it gets, if it fits."""

    def take(x):
        trains = recording_of_thread.get() is not None or inside_split_call.get()
        if BACKEND == "torch":  # else nothing is kept for a gradient
            trains = trains and torch.is_grad_enabled()
        if not trains or x.shape[0] == 0:
            return x
        if BACKEND != "tensorflow":
            memory.take(x.shape[0])
            return x
        rows = tf.numpy_function(memory.take, [tf.shape(x)[0]], tf.int32)
        with tf.control_dependencies([rows]):
            return tf.identity(x)

    take.__module__ = "keras.activations"  # where nothing is tried
    return layers.Activation(take)
