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


class _Stand:
    """What shadows one object's method.

    Attributes:
        count: steps that run, of several replicas perhaps.
        before: what the owner had by that name, if it had its own.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any, Any], Any]) -> None:
        self.count = 0
        self.before = vars(owner).get(name)
        method = getattr(owner, name)
        _put(owner, name, functools.wraps(method)(make(owner, method)))


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
        self._stands: dict[int, _Stand] = {}

    @contextlib.contextmanager
    def of(self, owners: Iterable[Any]) -> Iterator[None]:
        """Let the function shadow the method of each object in a block."""
        owners = list(owners)
        for owner in owners:
            self._stand_in_front(owner)
        try:
            yield
        finally:
            for owner in owners:
                self._step_aside(owner)

    def _stand_in_front(self, owner: Any) -> None:
        with _lock:
            if id(owner) not in self._stands:
                self._stands[id(owner)] = _Stand(owner, self._name, self._make)
            self._stands[id(owner)].count += 1

    def _step_aside(self, owner: Any) -> None:
        with _lock:
            stand = self._stands[id(owner)]
            stand.count -= 1
            if stand.count == 0:
                del self._stands[id(owner)]
                if stand.before is not None:
                    _put(owner, self._name, stand.before)
                else:
                    vars(owner).pop(self._name, None)
