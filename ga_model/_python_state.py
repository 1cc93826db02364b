"""What layers keep in Python between calls, and where Python's random numbers stand."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from ga_model._internals import layers_in


class PythonState:
    """The attributes of a layer and of those in it, lists in them, and the state of `random` and
    `numpy.random`, as they are now.

    Variables are not part of it.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._attributes = [(part, dict(vars(part))) for part in layers_in(layer)]
        values = [value for _, attributes in self._attributes for value in attributes.values()]
        self._lists = [(value, list(value)) for value in values if isinstance(value, list)]
        self._random = random.getstate(), np.random.get_state()

    def put_back(self) -> None:
        """Let everything be as it was."""
        for part, attributes in self._attributes:
            present = vars(part)
            for name in present.keys() - attributes.keys():
                del present[name]
            present.update(attributes)
        for value, content in self._lists:
            list.__setitem__(value, slice(None), content)
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put back in the end what there is now."""
        now = PythonState(self._layer)
        try:
            yield
        finally:
            now.put_back()
