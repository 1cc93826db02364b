"""Format text tables, and the memory sizes in their cells."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, with the first column left-aligned and the others right-aligned."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in header:
        grid.add_column(title, justify="right", vertical="bottom", no_wrap=True)
    grid.columns[0].justify = "left"
    for row in rows:
        grid.add_row(*row)
    out = io.StringIO()
    console = Console(file=out, width=1000, color_system=None, force_jupyter=False, markup=False)
    console.print(grid, highlight=False, emoji=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def megabytes(size: int) -> str:
    """Format a number of bytes in MB."""
    return f"{size / 1e6:,.0f} MB"
