"""Calibration tokens as a recipe asks for them, and an account of where they came from."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from compress.errors import DataError
from compress.text.tokenizer import Tokenizer
from compress_calibration.config import CalibrationConfig, SourceConfig
from compress_calibration.packing import PackedRow, pack_rows, pad_rows, with_ends
from compress_calibration.sources import drawn_documents

Generate = Callable[[int, int], Tensor]

# Long documents are drawn in pieces of two rows or so (4 characters a token), never tiny ones.
PIECE_CHARS_PER_TOKEN = 8
PIECE_CHARS = 1 << 12
# Texts tokenized in one call: enough for all cores, little to throw away at the end.
BATCH_CHARS = 1 << 17


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """What was used of one source.

    `share` is the part of all tokens asked for, `documents` those begun in a row that was used
    (pieces, where a document was long), `cut_tokens` what padding cut off at the row's end.
    """

    kind: str
    name: str
    share: float
    documents: int
    rows: int
    tokens: int
    cut_tokens: int


@dataclass(frozen=True, slots=True)
class DataSummary:
    """What calibration saw; `sha256` is over the ids (int64, little endian), then the mask."""

    samples: int
    length: int
    packing: str
    seed: int
    tokens: int
    sha256: str
    sources: tuple[SourceSummary, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as plain lists and dicts."""
        return {**asdict(self), "sources": [asdict(source) for source in self.sources]}


@dataclass(frozen=True, slots=True)
class TokenSet:
    """ids int64 [samples, length]; mask bool of that shape, True at real tokens, or None."""

    ids: Tensor
    mask: Tensor | None
    summary: DataSummary


def build(
    config: CalibrationConfig,
    tokenizer: Tokenizer | None,
    *,
    generate: Generate | None,
    vocab: int,
    fewest: int | None = None,
) -> TokenSet:
    """Exactly the rows that the recipe asks for, the same ones for the same seed.

    fewest: rows that do where a source holds no more; None for all that are asked for.

    generate(count, length) -> ids [count, length] serves the source "self" and is called at most
    once; `vocab` is the number of embeddings of the model. `tokenizer` may be None where "self"
    is the only source. Raises DataError when a source holds too little, gets no row of the
    mixture, cannot be read, or when an id has no embedding.
    """
    streams = [_rows(config, index, tokenizer, generate) for index in range(len(config.sources))]
    taken = _mix(config, streams, config.samples if fewest is None else fewest)
    config = replace(config, samples=len(taken))
    rows = [row for _, row in taken]
    fill = _pad_id(tokenizer)
    ids = torch.full((config.samples, config.length), fill, dtype=torch.int64)
    mask = torch.zeros(config.samples, config.length, dtype=torch.bool)
    for position, row in enumerate(rows):
        ids[position, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.int64)
        mask[position, : len(row.ids)] = True
    _check_range(ids, vocab)
    kept = mask if config.packing == "pad" else None
    return TokenSet(ids, kept, _summary(config, taken, digest(ids, kept)))


def shares(sources: Sequence[SourceConfig]) -> list[float]:
    """Weights scaled to sum 1."""
    total = sum(source.weight for source in sources)
    return [source.weight / total for source in sources]


def _mix(
    config: CalibrationConfig, streams: Sequence[Iterator[PackedRow]], fewest: int
) -> list[tuple[int, PackedRow]]:
    """Rows of all sources, interleaved so that their tokens keep to the shares at any time.

    The next row comes from the source that is furthest behind: least (tokens + length/2) / share,
    Webster's rule, which rounds every share to the nearest row.
    """
    share = shares(config.sources)
    tokens = [0] * len(streams)
    taken: list[tuple[int, PackedRow]] = []
    for _ in range(config.samples):
        index = min(range(len(streams)), key=lambda i: (tokens[i] + config.length / 2) / share[i])
        row = next(streams[index], None)
        if row is None and len(taken) >= fewest:
            break
        if row is None:
            found = sum(source == index for source, _ in taken)
            raise DataError(_too_little(config, index, found))
        tokens[index] += len(row.ids)
        taken.append((index, row))
    for index, count in enumerate(tokens):
        if count == 0:
            source = config.sources[index]
            raise DataError(
                f"calibration source {source.name} gets none of {config.samples} rows at weight"
                f" {source.weight:g}; raise samples or its weight"
            )
    return taken


def _too_little(config: CalibrationConfig, index: int, found: int) -> str:
    source = config.sources[index]
    asked = f"{config.samples} rows are asked for"
    if len(config.sources) > 1:
        share = shares(config.sources)[index]
        asked = f"{share:.0%} of {config.samples} rows is its share"
    unit = f"rows of {config.length} tokens" if config.packing == "pack" else "documents"
    return (
        f"calibration source {source.name} holds {found} {unit}, {asked};"
        " lower samples or length, or add text"
    )


def _rows(
    config: CalibrationConfig, index: int, tokenizer: Tokenizer | None, generate: Generate | None
) -> Iterator[PackedRow]:
    source = config.sources[index]
    if source.kind == "self":
        return _generated(config, index, generate)
    if tokenizer is None:
        raise DataError(
            f"calibration source {source.name} is text, and the checkpoint has no tokenizer;"
            " add tokenizer.json, or calibrate with kind: self"
        )
    # A text seed is hashed by Python in a fixed way, so neighbouring seeds share nothing.
    rng = Random(f"{config.seed}/{index}")
    piece = max(PIECE_CHARS, PIECE_CHARS_PER_TOKEN * config.length)
    documents = drawn_documents(source, tokenizer, rng, piece)
    encoded = encoded_documents(documents, tokenizer)
    cut = pack_rows if config.packing == "pack" else pad_rows
    return cut(encoded, config.length)


def encoded_documents(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Ids of every document with its BOS (or EOS), tokenized in batches."""
    for texts in _batches(documents):
        for ids in tokenizer.encode_batch(texts):
            yield with_ends(ids, tokenizer.bos_id, tokenizer.eos_id)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    texts: list[str] = []
    chars = 0
    for text in documents:
        texts.append(text)
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield texts
            texts, chars = [], 0
    if texts:
        yield texts


def _generated(
    config: CalibrationConfig, index: int, generate: Generate | None
) -> Iterator[PackedRow]:
    assert generate is not None, "the source 'self' needs the model's sampler"
    # One call only, for the same seed would write the same text again. Rows of other sources may
    # be shorter when padded, which lowers the number of full rows that reach the share: no more
    # than this many are ever drawn by _mix.
    share = shares(config.sources)[index]
    most = math.ceil(share * (config.samples + len(config.sources) / 2) + 0.5)
    count = min(config.samples, most)
    ids = generate(count, config.length)
    assert ids.shape == (count, config.length), f"sampler gave {tuple(ids.shape)}"
    for row in ids.tolist():
        yield PackedRow(row, 1)


def _pad_id(tokenizer: Tokenizer | None) -> int:
    """Any id does: the mask hides it."""
    if tokenizer is None:
        return 0
    return next((i for i in (tokenizer.eos_id, tokenizer.bos_id) if i is not None), 0)


def _check_range(ids: Tensor, vocab: int) -> None:
    largest = int(ids.max())
    if largest >= vocab:
        raise DataError(
            f"the tokenizer gives id {largest}, the model has {vocab} embeddings;"
            " they do not belong together"
        )


def digest(ids: Tensor, mask: Tensor | None) -> str:
    """sha256 over the ids (int64, little endian), then the mask."""
    state = hashlib.sha256(ids.numpy().astype("<i8").tobytes())
    if mask is not None:
        state.update(mask.numpy().tobytes())
    return state.hexdigest()


def _summary(
    config: CalibrationConfig, taken: Sequence[tuple[int, PackedRow]], sha256: str
) -> DataSummary:
    share = shares(config.sources)
    sources = []
    for index, source in enumerate(config.sources):
        rows = [row for owner, row in taken if owner == index]
        sources.append(
            SourceSummary(
                kind=source.kind,
                name=source.name,
                share=share[index],
                documents=sum(row.documents for row in rows),
                rows=len(rows),
                tokens=sum(len(row.ids) for row in rows),
                cut_tokens=sum(row.cut for row in rows),
            )
        )
    return DataSummary(
        samples=config.samples,
        length=config.length,
        packing=config.packing,
        seed=config.seed,
        tokens=sum(source.tokens for source in sources),
        sha256=sha256,
        sources=tuple(sources),
    )
