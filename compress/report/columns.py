"""Rows of words as aligned columns of plain text."""

from collections.abc import Sequence


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns as wide as their longest cell, two spaces between; no space at the end."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
