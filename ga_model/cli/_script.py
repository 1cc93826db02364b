"""Load a compiled model and data from a user's script."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from ga_model.base._types import Nest
from ga_model.tools._process import CommandError


def load(target: str) -> tuple[keras.Model, tuple[Nest, Nest, Nest]]:
    """Call "FILE.py:function"; return model and (x, y, sample_weight), or raise CommandError."""
    arguments, sys.argv = sys.argv, [target.rpartition(":")[0]]
    try:
        return _model_and_data(_load_function(target)())
    except SystemExit:
        raise CommandError(
            f"The script must not exit. Received: {target!r}, which did. "
            "Move code that only runs as a script under `if __name__ == '__main__':`."
        ) from None
    finally:
        sys.argv = arguments


def _load_function(target: str) -> Callable[[], Any]:
    """Import a file as a module, with its folder on `sys.path`, and return its function."""
    name, separator, function = target.rpartition(":")
    path = Path(name)
    if not separator or path.suffix != ".py" or not function.isidentifier():
        raise CommandError(
            "The script must be passed as FILE.py:function. "
            f"Received: {target!r}. Write train.py:make, for a function `make` in train.py."
        )
    if not path.is_file():
        raise CommandError(
            f"The script must be a file that exists. Received: {name!r}. "
            "Pass the path of a Python script."
        )
    other = sys.modules.get(path.stem)
    if other is not None and getattr(other, "__file__", None) != str(path.resolve()):
        raise CommandError(
            "The script is imported as a module, so its name must not be taken. "
            f"Received: {name!r}, but there is another module {path.stem!r}. Rename the file."
        )
    sys.path.insert(0, str(path.resolve().parent))
    spec: Any = importlib.util.spec_from_file_location(path.stem, path.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where Keras and pickle look up its classes
    spec.loader.exec_module(module)
    member = getattr(module, function, None)
    if not callable(member):
        raise CommandError(
            "The script must define the function. "
            f"Received: {name!r} without a function {function!r}. "
            "Define it without arguments; it returns a compiled model and data."
        )
    return member  # type: ignore[no-any-return]


def _model_and_data(returned: Any) -> tuple[keras.Model, tuple[Nest, Nest, Nest]]:
    """Return model and (x, y, sample_weight) from the result of the user's function."""
    parts = list(returned) if isinstance(returned, tuple) else [returned]
    if not 2 <= len(parts) <= 4 or not isinstance(parts[0], keras.Model):
        types = [type(part).__name__ for part in parts]
        raise CommandError(
            "The function must return (model, x), (model, x, y) or (model, x, y, sample_weight), "
            f"with a compiled Keras model. Received: {types}. Return them as one tuple."
        )
    model, x, y, sample_weight = [*parts, None, None][:4]
    return model, (x, y, sample_weight)
