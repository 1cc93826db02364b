"""Call a layer again with the Python state of its first call."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ga_model.base._context import ThreadValue
from ga_model.base._internals import layers_in, note_content, unwrapped

# Whether calls of layers are parts of one that is split already, and so are left as they are.
inside_of_call = ThreadValue(False)


class Attributes:
    """The attributes of objects, and lists, dicts, sets and deques in them, as they are now.

    What other objects hold is not part of it.

    Args:
        parts: the objects.
        has_arrays: whether the values of NumPy arrays in attributes and containers are part of it.
    """

    def __init__(self, parts: Iterable[Any], has_arrays: bool = False) -> None:
        self._attributes = [(part, dict(vars(part))) for part in parts]
        present = [vars(part).values() for part, _ in self._attributes if has_arrays]
        leaves = {id(leaf): leaf for values in present for leaf in leaves_in(values)}
        arrays = [leaf for leaf in leaves.values() if isinstance(leaf, np.ndarray)]
        self._arrays = [(array, array.copy()) for array in arrays if array.flags.writeable]
        found: dict[int, tuple[Any, Any, Any]] = {}
        for _, attributes in self._attributes:
            _note_contents(attributes.values(), found)
        self._contents = list(found.values())

    def put_back(self) -> None:
        """Let everything be as it was."""
        for array, value in self._arrays:
            array[...] = value
        for part, attributes in self._attributes:
            present = vars(part)
            for name in present.keys() - attributes.keys():
                del present[name]
            present.update(attributes)
        for value, content, wrapper in self._contents:
            if content or value:  # most of Keras's own are empty
                _fill(value, content)
                note_content(wrapper)


@functools.lru_cache(maxsize=256)
def _is_container(kind: Any) -> bool:
    """Return whether a class is one of containers: a value's `__class__`, which proxies have."""
    return issubclass(kind, (list, dict, set, deque))


def _note_contents(values: Iterable[Any], found: dict[int, tuple[Any, Any, Any]]) -> None:
    """Note containers among values, and in these, with a copy of what each has.

    The last of each entry is the container, or what TensorFlow tracks it with.
    """
    for wrapper in values:
        if not _is_container(wrapper.__class__):
            continue
        if id(value := unwrapped(wrapper)) not in found:
            content = dict(value) if isinstance(value, dict) else list(value)
            found[id(value)] = value, content, wrapper
            if content:
                _note_contents(value.values() if isinstance(value, dict) else value, found)


def leaves_in(values: Iterable[Any]) -> list[Any]:
    """Return what is no container among values, and in these."""
    leaves, known, waiting = [], set(), list(values)
    while waiting:
        wrapper = waiting.pop()
        if not _is_container(wrapper.__class__):
            leaves.append(wrapper)
        elif id(value := unwrapped(wrapper)) not in known:
            known.add(id(value))
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return leaves


def _fill(value: Any, content: Any) -> None:
    """Let a container have what it had, whatever a class of Keras's does when it gets that."""
    if isinstance(value, list):
        list.__setitem__(value, slice(None), content)
    elif isinstance(value, dict):
        dict.clear(value)
        dict.update(value, content)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, content)
    else:
        value.clear()
        value.extend(content)


class PythonState(Attributes):
    """The `Attributes` of a layer and of those in it, and the state of `random` and
    `numpy.random`, as they are now.

    Variables are not part of it.

    Args:
        layer: the layer.
        others: other objects.
        has_arrays: as `Attributes` takes it.
    """

    def __init__(self, layer: Any, others: Iterable[Any] = (), has_arrays: bool = False) -> None:
        super().__init__([*layers_in(layer), *others], has_arrays)
        self._random = random.getstate(), np.random.get_state()

    def put_back(self) -> None:
        super().put_back()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])

    def changed(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what is another now: a layer, the name of its attribute, and that one's value."""
        contents = {id(value): content for value, content, _ in self._contents}
        for part, attributes in self._attributes:
            for name, value in vars(part).items():
                before = attributes.get(name)
                if not _is_container(value.__class__) and value is before:
                    continue
                value = unwrapped(value)
                is_same = value is unwrapped(before)
                if not is_same or _ids_in(contents.get(id(value), ())) != _ids_in(value):
                    yield part, name, value


def _ids_in(container: Any) -> list[int]:
    return list(map(id, container.values() if isinstance(container, dict) else container))
