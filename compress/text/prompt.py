"""From text to the ids that an engine takes."""

from collections.abc import Sequence
from typing import Protocol

from compress.errors import RequestError

Ids = tuple[int, ...]


class TextTokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]:
        """Ids, no special token added."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str: ...


def proper_text(text: str) -> str:
    """The text; RequestError where it has halves of characters, as from bytes that are no UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        place = f"{text[error.start]!r} at character {error.start + 1}"
        raise RequestError(f"the text is not UTF-8: {place}; convert it first") from None
    return text


def prompt_ids(tokenizer: TextTokenizer, text: str, *, bos: bool = True) -> Ids:
    """Ids of a prompt; with `bos` the beginning-of-text token in front, where the tokenizer has one
    and the text does not begin with it. RequestError for what has no token, and for what is no
    text.
    """
    ids = tokenizer.encode(proper_text(text))
    first = tokenizer.bos_id if bos else None
    if first is not None and ids[:1] != [first]:
        ids = [first, *ids]
    if not ids:
        why = "the tokenizer has no token that begins a text" if bos else "none is put in front"
        raise RequestError(f"the prompt is empty and {why}; write one")
    return tuple(ids)


def pair_ids(
    tokenizer: TextTokenizer, context: str, continuation: str, *, bos: bool = True
) -> tuple[Ids, Ids]:
    """Ids of a context, and those behind it that are to be scored.

    The whole is tokenized and cut where the context alone would end. White space at the end of the
    context counts to the continuation, as tokens begin with spaces. RequestError for a continuation
    without a token.
    """
    begin = prompt_ids(tokenizer, context.rstrip(), bos=bos)
    tail = prompt_ids(tokenizer, context + continuation, bos=bos)[len(begin) :]
    if not tail:
        raise RequestError(
            f"continuation {continuation!r:.60} adds no token to the context; write more"
        )
    return begin, tail
