"""Documents of one source, in file order or drawn with a seed."""

from collections.abc import Iterable, Iterator
from random import Random

from compress.text.tokenizer import Tokenizer
from compress_calibration.config import SourceConfig
from compress_calibration.hub import probe, read_hub
from compress_calibration.readers import (
    cut,
    read_dataset,
    read_jsonl,
    read_parquet,
    read_text,
    source_files,
)

# What a shuffle holds at a time. A source below both is shuffled as a whole; of a larger one the
# first rows come from the first 32 MB or so (of files, row groups and blocks in a drawn order).
BUFFER_DOCUMENTS = 1 << 16
BUFFER_CHARS = 1 << 25
# The hub is slow to read: fewer rows are fetched before the first one is used.
BUFFER_HUB_DOCUMENTS = 4096


def documents(
    source: SourceConfig, tokenizer: Tokenizer, piece: int | None = None
) -> Iterator[str]:
    """Whole documents in file order, white space at their ends kept only inside rows.

    `tokenizer` renders chats; plain text never asks it. Blank documents are left out, they hold
    no tokens. A text file without the separator is one document, read as a whole. piece: characters
    that a document of a text file is cut at, to bound memory. Raises DataError naming file and
    line, also where a document has more than readers.MOST_CHARS; DependencyError where a reader
    needs an extra.
    """
    return _not_blank(_read(source, tokenizer, piece, None))


def drawn_documents(
    source: SourceConfig, tokenizer: Tokenizer, rng: Random, piece: int
) -> Iterator[str]:
    """Documents in an order drawn from `rng`, in bounded memory.

    A document longer than about 1.5 `piece` characters is drawn as several pieces of `piece`, so
    that one long file gives different seeds different text.
    """
    whole = _not_blank(_read(source, tokenizer, piece, rng))
    pieces = (text for document in whole for text in cut(document, piece))
    limit = BUFFER_HUB_DOCUMENTS if source.kind == "hub" else BUFFER_DOCUMENTS
    return shuffled(_not_blank(pieces), rng, limit)


def check_source(source: SourceConfig) -> None:
    """Find what would stop a run, before it starts, without reading data.

    Raises DataError for files that are not there and a hub out of reach.
    """
    if source.kind == "hub":
        probe(source.id)
    elif source.kind != "self":
        source_files(source)


def shuffled(
    texts: Iterable[str], rng: Random, limit: int, limit_chars: int = BUFFER_CHARS
) -> Iterator[str]:
    """All texts in a drawn order, holding at most `limit` texts and about `limit_chars`."""
    held: list[str] = []
    chars = 0
    for text in texts:
        held.append(text)
        chars += len(text)
        while len(held) > limit or (chars > limit_chars and len(held) > 1):
            out = _take(held, rng)
            chars -= len(out)
            yield out
    while held:
        yield _take(held, rng)


def _take(held: list[str], rng: Random) -> str:
    index = int(rng.random() * len(held))
    held[index], held[-1] = held[-1], held[index]
    return held.pop()


def _not_blank(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if text and not text.isspace())


def _read(
    source: SourceConfig, tokenizer: Tokenizer, piece: int | None, rng: Random | None
) -> Iterator[str]:
    if source.kind == "text":
        return read_text(source, piece, rng)
    if source.kind == "jsonl":
        return read_jsonl(source, tokenizer, rng)
    if source.kind == "parquet":
        return read_parquet(source, tokenizer, rng)
    if source.kind == "dataset":
        return read_dataset(source, tokenizer, rng)
    assert source.kind == "hub", f"{source.kind} has no documents"
    return read_hub(source, tokenizer)
