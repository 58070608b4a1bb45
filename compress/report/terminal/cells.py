"""Text for a terminal: printable, cut, wrapped and filled up by the cells it takes."""

import unicodedata

COLUMNS = 80


def clean(text: str) -> str:
    """One line of printable characters: an escape sequence in a model's text stays harmless."""
    shown = (c if c.isprintable() else " " if c.isspace() else "�" for c in text)
    return " ".join("".join(shown).split())


def width(text: str) -> int:
    """Terminal cells that `text` takes."""
    return sum(_cell(c) for c in text)


def _cell(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def pad(text: str, cells: int, *, left: bool = True) -> str:
    space = " " * max(0, cells - width(text))
    return text + space if left else space + text


def cut(text: str, cells: int = COLUMNS) -> str:
    """`text`, shortened with dots when it takes more cells."""
    if width(text) <= cells:
        return text
    room, kept = cells - 3, ""
    for character in text:
        room -= _cell(character)
        if room < 0:
            break
        kept += character
    return kept.rstrip() + "..."


def wrap(text: str, cells: int, *, whole: bool = False) -> list[str]:
    """Lines of at most `cells`, broken at spaces where there are any. whole: a longer word has a
    line of its own, as it is there to be copied; else it is broken."""
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if width(joined) <= cells:
            line = joined
            continue
        if line:
            lines.append(line)
        while width(word) > cells and not whole:
            piece = _fit(word, cells)
            lines.append(piece)
            word = word[len(piece) :]
        line = word
    return [*lines, line]


def _fit(word: str, cells: int) -> str:
    used = 0
    for place, character in enumerate(word):
        used += _cell(character)
        if used > cells:
            return word[:place]
    return word
