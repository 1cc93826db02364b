"""All variables of the process, whoever has them.

Eagerly, nothing tells which variables a step uses: it may reach them by a global name.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ga_model.backends.tensorflow.replicas import copies


def living(classes: Any) -> list[Any]:
    """Return all instances of classes that the process holds, but for those of a `gc.freeze`."""
    return [value for value in gc.get_objects() if issubclass(type(value), classes)]


class AllVariables:
    """The values of all variables of the process, as they are now.

    TensorFlow copies nothing before it changes.

    Args:
        but: variables that are left out.
    """

    def __init__(self, but: Iterable[Any] = ()) -> None:
        self._left_out = {id(copy): copy for variable in but for copy in copies(variable)}
        self._values: dict[int, tuple[Any, Any]] = {}
        for variable in living(tf.Variable):
            self._note(variable)

    def _note(self, variable: Any) -> None:
        for copy in copies(variable):
            if id(copy) in self._left_out:
                continue
            handle = getattr(copy, "handle", None)  # of one that is made in a graph there is none
            if handle is not None and not tf.is_symbolic_tensor(handle) and copy.is_initialized():
                self._values.setdefault(id(copy), (copy, tf.identity(copy)))

    @contextlib.contextmanager
    def with_new(self) -> Iterator[None]:
        """Note also those that are made in a block, as they begin."""

        def create(next_creator: Any, **settings: Any) -> Any:
            self._note(variable := next_creator(**settings))
            return variable

        with tf.variable_creator_scope(create):
            yield

    def changed(self) -> list[Any]:
        """Return those that have other values now."""
        return [variable for variable, value in self._values.values() if _differs(variable, value)]

    def put_back(self) -> None:
        """Let all be as they were."""
        for variable in self.changed():
            variable.assign(self._values[id(variable)][1])


def _differs(variable: Any, before: Any) -> bool:
    value = tf.identity(variable)
    return value.shape != before.shape or not bool(tf.reduce_all(tf.equal(value, before)))
