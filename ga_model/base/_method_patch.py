"""Functions that shadow others while steps run: methods of objects, whose classes
are left as they are, and of functions of modules and classes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_lock = threading.Lock()


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:  # what Keras tracks by `setattr` has nothing to do with it
        vars(owner)[name] = value


class MethodPatch:
    """Lets functions shadow a method of objects, or what modules and classes define.

    Args:
        name: of the method.
        make: takes an object, a module or a class, and what it has by the name, and returns the
            function.
    """

    def __init__(self, name: str, make: Callable[[Any, Any], Any]) -> None:
        self._name = name
        self._make = make
        # By the id of each object: how many blocks it is in, and what it had by the name itself.
        self._shadowed: dict[int, tuple[int, Any]] = {}

    @contextlib.contextmanager
    def of(self, owners: Iterable[Any]) -> Iterator[None]:
        """Let the function shadow the method of each object in a block."""
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
