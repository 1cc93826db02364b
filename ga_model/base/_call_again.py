"""Call a layer again with the Python state of its first call."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from ga_model.base._context import ThreadValue
from ga_model.base._internals import layers_in

# Whether calls of layers are parts of one that is split already, and so are left as they are.
inside_of_call = ThreadValue(False)


class CallContext(keras.layers.Layer):
    """Calls a function as if a layer had called it.

    Layers inside then know if they train, and keep the losses that a step may read from them.
    """

    def __init__(self) -> None:
        super().__init__(name="microbatch", dtype=keras.config.floatx())
        self.built = True

    def call(self, function: Any, training: Any = None) -> Any:
        return function()


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

    def changed(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what is another now: a layer, the name of its attribute, and that one's value."""
        contents = {id(value): content for value, content in self._lists}
        for part, attributes in self._attributes:
            for name, value in vars(part).items():
                content = contents.get(id(value))
                is_same_list = content is None or list(map(id, content)) == list(map(id, value))
                if value is not attributes.get(name) or not is_same_list:
                    yield part, name, value

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put back in the end what there is now."""
        now = PythonState(self._layer)
        try:
            yield
        finally:
            now.put_back()
