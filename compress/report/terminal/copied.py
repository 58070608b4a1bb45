"""Lines to be copied: blocks of text, each of which stands by itself."""

from collections.abc import Iterable, Sequence


def as_lines(blocks: Iterable[str]) -> list[str]:
    """All lines, with an empty one between two blocks."""
    lines: list[str] = []
    for block in blocks:
        lines += ["", *block.split("\n")] if lines else block.split("\n")
    return lines


def as_blocks(lines: Sequence[str]) -> list[str]:
    """What `as_lines` was given."""
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line:
            blocks[-1].append(line)
        else:
            blocks.append([])
    return ["\n".join(block) for block in blocks if block]


def indented(blocks: Iterable[str]) -> list[str]:
    """For a terminal, below a title."""
    return [f"  {line}" if line else "" for line in as_lines(blocks)]
