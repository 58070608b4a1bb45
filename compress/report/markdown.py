"""What others wrote, inside a Markdown file: as words, or as code, and never as markup."""

import re

# All that CommonMark and its extensions on model hubs (tables, strikethrough, math, HTML) read as
# markup within a line. The start of a line is ours: no quoted text begins one. An underscore inside
# a word is none.
_MARKUP = re.compile(r"([\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_]))")
_LINK = re.compile(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?<=\w)(?=@\w)", re.IGNORECASE)


def words(text: str) -> str:
    """One line that reads as `text`: its markup is escaped, its links are none."""
    return _LINK.sub("\\\\", _MARKUP.sub(r"\\\1", _one_line(text)))


def code(text: str) -> str:
    """`text` as inline code outside of tables, between more backticks than it has in a row."""
    line = _one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    # A space goes away on both sides where there is one on both.
    pad = " " if line[:1] in ("`", " ") or line[-1:] in ("`", " ") or not line else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def block(text: str) -> str:
    """Lines as a block of code, between more backticks than they have in a row."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _one_line(text: str) -> str:
    shown = (c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}"
             for c in text)  # fmt: skip
    return " ".join("".join(shown).split())
