"""Tables of text, and what stands in their cells."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines, the first column flush left and the others flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:])]
        lines.append("  ".join([name.ljust(widths[0]), *right]).rstrip())
    return "\n".join(lines)


def megabytes(size: int | None) -> str:
    """Return a number of bytes as text. None is one that nothing tells."""
    return "n/a" if size is None else f"{size / 1e6:,.0f} MB"
