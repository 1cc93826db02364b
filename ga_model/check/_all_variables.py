"""All variables of the process, whoever has them.

Eagerly, nothing tells which variables a step uses: it may reach them by a global name.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from ga_model.backends.tensorflow.replicas import copies


class AllVariables:
    """The values of all variables of the process, as they are now, but for those of a `gc.freeze`.

    TensorFlow copies nothing before it changes.

    Args:
        but: variables that are left out.
    """

    def __init__(self, but: Iterable[Any]) -> None:
        left_out = {id(copy) for variable in but for copy in copies(variable)}
        living = [value for value in gc.get_objects() if issubclass(type(value), tf.Variable)]
        found = {id(copy): copy for variable in living for copy in copies(variable)}
        self._values = [
            (copy, tf.identity(copy))
            for key, copy in found.items()
            if key not in left_out and _has_value(copy)
        ]

    def put_back(self) -> None:
        """Let all be as they were."""
        for variable, before in self._values:
            now = tf.identity(variable)
            if now.shape != before.shape or not bool(tf.reduce_all(tf.equal(now, before))):
                variable.assign(before)


def _has_value(variable: Any) -> bool:
    handle = getattr(variable, "handle", None)  # of one that is made in a graph there is none
    return handle is not None and not tf.is_symbolic_tensor(handle) and variable.is_initialized()
