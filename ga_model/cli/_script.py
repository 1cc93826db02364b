"""Get a compiled model and its data from a script of the user's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from ga_model.tools._errors import ToldError


class ScriptError(ToldError):
    """The script does not give what it should. The message says what, and what to do."""


def load(target: str) -> tuple[Any, tuple[Any, Any, Any]]:
    """Import a file, call its function, and return the model and x, y and sample weights.

    Args:
        target: "FILE.py:function".

    Raises:
        ScriptError: the file, the function or what it returns is not what it should be.
    """
    arguments, sys.argv = sys.argv, [target.rpartition(":")[0]]
    try:
        return _model_and_data(_load_function(target)())
    except SystemExit:
        raise ScriptError(
            f"The script must not exit. Received: {target!r}, which did. "
            "Move code that only runs as a script under `if __name__ == '__main__':`."
        ) from None
    finally:
        sys.argv = arguments


def _load_function(target: str) -> Callable[[], Any]:
    """Import a file as a module, and return a function of it.

    The file's folder is put in front of the places that modules are imported from, as where it is
    run as a script. Its `__name__` is not `"__main__"`.
    """
    name, separator, function = target.rpartition(":")
    path = Path(name)
    if not separator or path.suffix != ".py" or not function.isidentifier():
        raise ScriptError(
            "The script must be passed as FILE.py:function. "
            f"Received: {target!r}. Write train.py:make, for a function `make` in train.py."
        )
    if not path.is_file():
        raise ScriptError(
            f"The script must be a file that exists. Received: {name!r}. "
            "Pass the path of a Python script."
        )
    other = sys.modules.get(path.stem)
    if other is not None and getattr(other, "__file__", None) != str(path.resolve()):
        raise ScriptError(
            "The script is imported as a module, so its name must not be taken. "
            f"Received: {name!r}, but there is another module {path.stem!r}. Rename the file."
        )
    sys.path.insert(0, str(path.resolve().parent))
    spec: Any = importlib.util.spec_from_file_location(path.stem, path.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where Keras and pickle look its classes up
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ScriptError(
            "The script must define the function. "
            f"Received: {name!r} without a function {function!r}. "
            "Define it without arguments; it returns a compiled model and data."
        )
    return found  # type: ignore[no-any-return]


def _model_and_data(returned: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    """Take apart what the user's function returned. What is not there is None."""
    is_right = isinstance(returned, tuple) and 2 <= len(returned) <= 4
    if not is_right or not isinstance(returned[0], keras.Model):
        types = (
            [type(part).__name__ for part in returned]
            if isinstance(returned, tuple)
            else type(returned).__name__
        )
        raise ScriptError(
            "The function must return (model, x), (model, x, y) or (model, x, y, sample_weight), "
            f"with a compiled Keras model. Received: {types}. Return them as one tuple."
        )
    model, *data = returned
    x, y, sample_weight = [*data, None, None][:3]
    return model, (x, y, sample_weight)
