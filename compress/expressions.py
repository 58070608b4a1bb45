"""Regular expressions that others wrote, in a recipe or in a checkpoint, matched in bounded time.

Python's own `re` goes on for ever with (.|.)*z on a layer's name. The package `regex` reads the
same language, lookaheads and all, and stops when asked to. What the two read differently is
refused or written so that it is not: what we match here other loaders match with `re`.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from time import process_time
from typing import Any

Refuse = Callable[[str], Exception]

# Processor time of one expression on all texts it is tried on. A sound one takes 5 microseconds for
# the name of a layer, so 46,000 names (DeepSeek-V3) take 0.2 s.
SECONDS = 1.0
# Time that each text and each character of the expression add: a list of 2,560 names, 119 kB long,
# takes 0.3 ms for a name.
_FREE, _FREE_CHARACTER = 1e-4, 1e-8
# `regex` writes the least match out: (a{1000}){1000} takes 0.5 s, ten times as many all memory.
_MOST_REPEATS = 100_000
_MOST_CHARACTERS = 1 << 20
# An escape, or a brace that begins no repeat; `regex` reads {e<=1} as "with one fault".
_BRACE = re.compile(r"\\N\{[^}]*\}|\\.|\{(?!\d+(?:,\d*)?\}|,\d*\})", re.DOTALL)
_REPEATS = re.compile(r"\{(\d*),?(\d*)\}")
_CLASS = re.compile(r"\[:\^?\w+:\]")  # a class in `regex`, characters in `re`


@dataclass(slots=True)
class Expression:
    """An expression, and how much of its time is left. Equal where the texts are.

    refuse: makes the error of "REASON; remedy".
    """

    text: str
    _refuse: Refuse = field(compare=False, repr=False)
    _compiled: Any = field(compare=False, repr=False)
    _left: float = field(compare=False, repr=False)

    def fullmatch(self, text: str) -> bool:
        """Whether the whole text matches."""
        return self._timed(self._compiled.fullmatch, text) is not None

    def match(self, text: str) -> bool:
        """Whether the beginning of the text matches."""
        return self._timed(self._compiled.match, text) is not None

    def search(self, text: str) -> bool:
        """Whether a part of the text matches."""
        return self._timed(self._compiled.search, text) is not None

    def last(self, text: str) -> str | None:
        """The last match in the text, of it the first group where there is one."""

        def all_of(text: str, timeout: float) -> list[Any]:
            return list(self._compiled.finditer(text, timeout=timeout))

        found = self._timed(all_of, text)
        return found[-1][1 if self._compiled.groups else 0] if found else None

    def _timed(self, look: Callable[..., Any], text: str) -> Any:
        self._left += _FREE + _FREE_CHARACTER * len(self.text)
        start = process_time()
        try:
            return look(text, timeout=max(self._left, 1e-6))
        except TimeoutError:
            shown = text if len(text) <= 60 else text[:57] + "..."
            raise self._refuse(
                f"takes more than {SECONDS:g} s of processor time, here on {shown!r}; write it"
                " without repeats of what repeats, such as (.*)*"
            ) from None
        finally:
            self._left -= process_time() - start


def expression(text: str, refuse: Refuse) -> Expression:
    """The expression, with all its time; `refuse`'s error for what is none."""
    try:
        return Expression(text, refuse, _compiled(text), SECONDS)
    except (re.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
        reason = "is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise refuse(f"is not a regular expression: {reason}") from None


def _compiled(text: str) -> Any:
    """ValueError for what `re` and `regex` do not read alike, or cannot hold."""
    import regex

    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters; {_MOST_CHARACTERS} are possible")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        try:
            re.compile(text)
        except FutureWarning as warning:
            raise ValueError(f"{warning}; put a backslash before the inner sign") from None
    if found := _CLASS.search(text):
        raise ValueError(f"{found[0]} is no class of characters in Python; write them out")
    repeats = 1
    for least, most in _REPEATS.findall(text):
        repeats *= max(int(least or 0), int(most or 0), 1)
    if repeats > _MOST_REPEATS:
        raise ValueError(f"its repeats multiply to {repeats}; {_MOST_REPEATS} are possible")
    plain = _BRACE.sub(lambda found: r"\{" if found[0] == "{" else found[0], text)
    try:
        return regex.compile(plain, regex.VERSION0)
    except regex.error as error:
        raise ValueError(str(error)) from None
