"""All variables of the process: eagerly, a step may use any, for example by a global name."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ga_model.backends.tensorflow.replicas import copies
from ga_model.backends.tensorflow.state import Variables


def other_variables(known: Iterable[Any]) -> Variables:
    """Return the values of all variables of the process, except known and frozen (`gc`) ones.

    TensorFlow copies a value only when its variable changes.
    """
    left_out = {id(copy) for variable in known for copy in copies(variable)}
    living = [value for value in gc.get_objects() if issubclass(type(value), tf.Variable)]
    found = {id(copy): copy for variable in living for copy in copies(variable)}
    values = Variables()
    values.note(v for key, v in found.items() if key not in left_out and _has_value(v))
    return values


def _has_value(variable: Any) -> bool:
    handle = getattr(variable, "handle", None)  # a variable of a graph may have none
    return handle is not None and not tf.is_symbolic_tensor(handle) and variable.is_initialized()
