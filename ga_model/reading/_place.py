"""Where an operation comes from, for a message."""

from __future__ import annotations

import os
import sysconfig
from typing import Any

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def place_of(op: Any) -> str:
    """Return an operation's type and the line of the user's that made it, for a message."""
    frames = [
        frame
        for frame in op.traceback or ()
        if not frame.filename.startswith(_LIBRARIES)
        and f"{os.sep}ga_model{os.sep}" not in frame.filename
    ]
    return f"{op.type!r}" + (f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else "")
