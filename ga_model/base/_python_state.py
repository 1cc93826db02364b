"""Snapshots of Python state, to call a layer again from the state before its first call."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from ga_model.base._context import ThreadValue
from ga_model.base._internals import layers_in, unwrapped

# Whether this thread is inside a call that is split. Calls inside it are not split again.
inside_split_call = ThreadValue(False)


SMALL = 65_536  # bytes of an array that is copied in each call of a layer


class Attributes:
    """A snapshot of objects' attributes, and of the lists, dicts, sets and deques in them.

    It includes the values of NumPy arrays, if they have at most `most_bytes`.
    """

    def __init__(self, parts: Iterable[object], most_bytes: int = sys.maxsize) -> None:
        self._attributes = [(part, dict(vars(part))) for part in parts]
        self._empty: list[Collection[Any]] = []  # empty containers, as most in Keras's layers are
        contents: dict[int, tuple[Collection[Any], Collection[Any]]] = {}
        arrays: dict[int, np.ndarray] = {}
        for _, attributes in self._attributes:
            _collect_contents(attributes.values(), contents, self._empty, arrays)
        self._contents = list(contents.values())
        written = [a for a in arrays.values() if a.flags.writeable and a.nbytes <= most_bytes]
        self._arrays = [(array, array.copy()) for array in written]

    def restore(self) -> None:
        """Restore the attributes and contents."""
        for array, value in self._arrays:
            array[...] = value
        for part, attributes in self._attributes:
            present = vars(part)
            for name in present.keys() - attributes.keys():
                del present[name]
            present.update(attributes)
        for value, content in self._contents:
            _fill(value, content)
        for value in self._empty:
            if value:
                _fill(value, ())


_CONTAINERS = (list, dict, set, deque)


@functools.lru_cache(maxsize=256)
def _is_container(kind: type) -> bool:
    """Return whether the `__class__` of a value, which may be a proxy, is a container's."""
    return issubclass(kind, _CONTAINERS)


def _collect_contents(
    values: Iterable[Any],
    contents: dict[int, tuple[Collection[Any], Collection[Any]]],
    empty: list[Collection[Any]],
    arrays: dict[int, np.ndarray],
) -> None:
    """Collect the arrays and containers in values, nested ones too, with copies of the latter.

    A layer has dozens of attributes, so this must be cheap for each.
    """
    for wrapper in values:
        if wrapper.__class__ is np.ndarray:
            arrays[id(wrapper)] = wrapper
        if not _is_container(wrapper.__class__):
            continue
        value = unwrapped(wrapper)
        if not value:
            empty.append(value)
        elif id(value) not in contents:
            contents[id(value)] = value, dict(value) if isinstance(value, dict) else list(value)
            _collect_contents(_parts_of(value), contents, empty, arrays)


def _parts_of(container: Collection[Any]) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container


def leaves_in(values: Iterable[Any]) -> list[Any]:
    """Return the values that are not containers, including those inside containers."""
    leaves, known, waiting = [], set(), list(values)
    while waiting:
        wrapper = waiting.pop()
        if not _is_container(wrapper.__class__):
            leaves.append(wrapper)
        elif id(value := unwrapped(wrapper)) not in known:
            known.add(id(value))
            waiting.extend(_parts_of(value))
    return leaves


def _fill(value: Collection[Any], content: Collection[Any]) -> None:
    """Set the contents of a container by the methods of its builtin type, which Keras overrides."""
    kind: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))
    kind.clear(value)
    (kind.update if hasattr(kind, "update") else kind.extend)(value, content)


class PythonState(Attributes):
    """The `Attributes` of a layer, its sublayers and other objects, and the random state of
    `random` and `numpy.random`. Values of variables are not included.
    """

    def __init__(
        self, layer: keras.Layer, others: Iterable[object] = (), most_bytes: int = sys.maxsize
    ) -> None:
        super().__init__([*layers_in(layer), *others], most_bytes)
        self._random = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        super().restore()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])

    def changed(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield the object, name and value of each attribute that changed since the snapshot."""
        contents = {id(value): content for value, content in self._contents}
        for part, attributes in self._attributes:
            for name, value in vars(part).items():
                before = attributes.get(name)
                if not _is_container(value.__class__) and value is before:
                    continue
                value = unwrapped(value)
                is_same = value is unwrapped(before)
                content = contents.get(id(value), ()) if is_same else ()  # empty ones are not in it
                if not is_same or ((value or content) and _ids_in(content) != _ids_in(value)):
                    yield part, name, value


def _ids_in(container: Collection[Any]) -> list[int]:
    return list(map(id, _parts_of(container)))
