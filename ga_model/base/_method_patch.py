"""Replace methods of objects, and functions of modules and classes, while steps run."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_lock = threading.Lock()


def _put(owner: object, name: str, value: Callable[..., Any]) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:  # bypass the `__setattr__` of Keras, which tracks values
        vars(owner)[name] = value


class MethodPatch:
    """A patch of the method `name` of objects, modules or classes for the duration of a block.

    `make` takes the object, module or class and its current method, and returns the replacement.
    """

    def __init__(
        self, name: str, make: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._name = name
        self._make = make
        # By id of object: how many blocks patch it, and its own attribute `name` from before.
        self._shadowed: dict[int, tuple[int, Callable[..., Any] | None]] = {}

    @contextlib.contextmanager
    def of(self, owners: Iterable[object]) -> Iterator[None]:
        """Replace the method of each object in a block. Blocks may nest and overlap."""
        owners = list(owners)
        for owner in owners:
            self._shadow(owner)
        try:
            yield
        finally:
            for owner in owners:
                self._uncover(owner)

    def _shadow(self, owner: object) -> None:
        with _lock:
            count, before = self._shadowed.get(id(owner), (0, vars(owner).get(self._name)))
            if count == 0:
                method = getattr(owner, self._name)
                _put(owner, self._name, functools.wraps(method)(self._make(owner, method)))
            self._shadowed[id(owner)] = count + 1, before

    def _uncover(self, owner: object) -> None:
        with _lock:
            count, before = self._shadowed.pop(id(owner))
            if count > 1:  # still in another block, for example a replica's
                self._shadowed[id(owner)] = count - 1, before
            elif before is not None:
                _put(owner, self._name, before)
            elif isinstance(owner, type):
                delattr(owner, self._name)
            else:
                vars(owner).pop(self._name, None)


def _without_training(_: object, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(call).bind(*args, **kwargs)
        bound.arguments["training"] = False
        return call(*bound.args, **bound.kwargs)

    return run


# In its block, layers are called with `training=False`.
without_training = MethodPatch("call", _without_training)
