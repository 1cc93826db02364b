"""Types of command-line arguments: each returns the value, or says what was expected."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def integer_from(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the type of integers from `least` up to `most`, or without a limit."""
    expected = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(
                f"must be {expected}. Received: {text!r}. Pass {least}, for example."
            )
        return value

    return parse


def positive_number(text: str) -> float:
    """Take a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a positive number. Received: {text!r}. Omit the option for the default."
        )
    return value


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
            'needs matplotlib, which is not installed. Run: pip install "ga_model[demo]"'
        ) from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(
            f"must end in a format that matplotlib supports: {', '.join(sorted(formats))}. "
            f"Received: {text!r}. Pass a name such as {file.stem or 'demo'}.png."
        )
    return path(text)
