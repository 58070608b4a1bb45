"""What a page gives to copy."""

from html import unescape
from pathlib import Path
from re import DOTALL, findall


def blocks_to_copy(page: Path) -> list[str]:
    """The text of each block, in order."""
    found = findall(r"<pre>([^<]*)</pre>", page.read_text(encoding="utf-8"), DOTALL)
    return [unescape(text) for text in found]
