"""Token lists of documents to rows of one length.

"pack": every document becomes [BOS] + ids, or ids + [EOS] for a tokenizer without a BOS (one
separator, as in pre-training; the end token of a chat model would be wrong after plain text).
All documents are joined and the stream is cut every `length` tokens: short ones are joined, long
ones continue in the next row, only the tail after the last full row is left over.

"pad": every document becomes a row, [BOS] + ids cut at `length`, padded on the right.

A document that begins with the BOS already (a rendered chat) is not given a second one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Tokens of one row (at most `length`), the documents begun in it, the tokens cut off."""

    ids: list[int]
    documents: int
    cut: int = 0


def with_ends(ids: list[int], bos_id: int | None, eos_id: int | None) -> list[int]:
    """A document's ids with the one token that parts it from its neighbours."""
    if bos_id is not None:
        return ids if ids[:1] == [bos_id] else [bos_id, *ids]
    if eos_id is not None:
        return ids if ids[-1:] == [eos_id] else [*ids, eos_id]
    return ids


def pack_rows(documents: Iterable[list[int]], length: int) -> Iterator[PackedRow]:
    """Full rows of `length` tokens out of the joined documents (with their ends)."""
    held: list[int] = []
    begun = 0
    for ids in documents:
        if not ids:
            continue
        begun += 1
        held += ids
        start = 0
        while len(held) - start >= length:
            # A document whose first token lies behind this row is counted with a later one.
            later = int(len(held) - len(ids) >= start + length)
            yield PackedRow(held[start : start + length], begun - later)
            begun = later
            start += length
        del held[:start]


def pad_rows(documents: Iterable[list[int]], length: int) -> Iterator[PackedRow]:
    """One row of 1 to `length` tokens for every document (with its ends)."""
    for ids in documents:
        if ids:
            yield PackedRow(ids[:length], 1, max(0, len(ids) - length))
