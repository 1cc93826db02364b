"""Types of command-line arguments: each returns the value, or says what was expected."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _number(
    kind: Callable[[str], Any], least: float, most: float, expected: str, way_out: str
) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {expected}. Received: {text!r}. {way_out}")
        return value

    return parse


def integer_from(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return the type of integers from `least` up to `most`."""
    expected = (
        f"an integer >= {least}" if most == math.inf else f"an integer from {least} to {most}"
    )
    return _number(int, least, most, expected, f"Pass {least}, for example.")


_LIMITS = math.ulp(0.0), math.nextafter(math.inf, 0.0)
_DEFAULT = "Omit the option for the default."
positive_number = _number(float, *_LIMITS, "a positive number", _DEFAULT)


def path(text: str) -> Path:
    """Take a file that can be written, as far as its folder tells."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file. Received: {text!r}, which is a folder. Pass a file name."
        )
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be a file in a folder that exists. Received: {text!r}. "
            f"Create the folder {str(file.parent)!r} first, or pass another path."
        )
    return file


def plot_path(text: str) -> Path:
    """Take a file of a format that matplotlib writes."""
    file = Path(text)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise argparse.ArgumentTypeError(
            "needs matplotlib, which is not installed. Run: pip install matplotlib"
        ) from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(
            f"must end in a format that matplotlib supports: {', '.join(sorted(formats))}. "
            f"Received: {text!r}. Pass a name such as {file.stem or 'demo'}.png."
        )
    return path(text)
