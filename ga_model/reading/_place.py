"""Where an operation comes from, for a message."""

from __future__ import annotations

import os
import sysconfig
from typing import Any

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_OURS = f"{os.sep}ga_model{os.sep}"
_OF_KERAS = tuple(os.sep.join(["keras", "src", name, ""]) for name in ("layers", "losses"))


def place_of(op: Any) -> str:
    """Return an operation's type and the line of the user's that made it, for a message."""
    frames = [frame for frame in op.traceback or () if _is_of_user(frame)]
    return f"{op.type!r}" + (f" in {_line(frames[-1])}" if frames else "")


def line_of_user(op: Any) -> str | None:
    """Return the line of the user's that made an operation, but by no layer or loss of Keras's."""
    for frame in reversed(op.traceback or ()):
        if _is_of_user(frame):
            return _line(frame)
        if _OURS in frame.filename or any(part in frame.filename for part in _OF_KERAS):
            return None
    return None


def _is_of_user(frame: Any) -> bool:
    return not (frame.filename.startswith(_LIBRARIES) or _OURS in frame.filename)


def _line(frame: Any) -> str:
    return f"{frame.filename}:{frame.lineno}"
