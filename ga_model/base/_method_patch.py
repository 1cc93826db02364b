"""Replace methods of objects, and functions of modules and classes, while steps run."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_lock = threading.Lock()


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:  # past the `setattr` of Keras, which tracks values
        vars(owner)[name] = value


class MethodPatch:
    """Replaces the method `name` of objects, modules or classes in a block.

    `make` takes the object, module or class and its present method; it returns the replacement.
    """

    def __init__(self, name: str, make: Callable[[Any, Any], Any]) -> None:
        self._name = name
        self._make = make
        # By the id of each object: how many blocks it is in, and its own attribute of the name.
        self._shadowed: dict[int, tuple[int, Any]] = {}

    @contextlib.contextmanager
    def of(self, owners: Iterable[Any]) -> Iterator[None]:
        """Replace the method of each object in a block."""
        owners = list(owners)
        for owner in owners:
            self._shadow(owner)
        try:
            yield
        finally:
            for owner in owners:
                self._uncover(owner)

    def _shadow(self, owner: Any) -> None:
        with _lock:
            count, before = self._shadowed.get(id(owner), (0, vars(owner).get(self._name)))
            if count == 0:
                method = getattr(owner, self._name)
                _put(owner, self._name, functools.wraps(method)(self._make(owner, method)))
            self._shadowed[id(owner)] = count + 1, before

    def _uncover(self, owner: Any) -> None:
        with _lock:
            count, before = self._shadowed.pop(id(owner))
            if count > 1:  # in a block of another replica, perhaps
                self._shadowed[id(owner)] = count - 1, before
            elif before is not None:
                _put(owner, self._name, before)
            else:
                vars(owner).pop(self._name, None)


def _without_training(_: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(call).bind(*args, **kwargs)
        bound.arguments["training"] = False
        return call(*bound.args, **bound.kwargs)

    return run


# In its block layers run as they do outside of training.
without_training = MethodPatch("call", _without_training)
