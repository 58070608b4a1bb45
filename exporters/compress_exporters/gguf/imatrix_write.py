"""Importance of columns as files that llama-quantize reads: GGUF, or the older .dat.

llama.cpp's pull request 9400 describes the first: of each tensor the sums of the squares of its
inputs, and of how many tokens they are. The second has means times calls, and how many calls.
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compress.checkpoint import disk
from compress.formats.gguf.fields import Fields
from compress.formats.gguf.layout import Piece
from compress_exporters.exporter import AGAIN
from compress_exporters.gguf.head import map_file, padded
from compress_exporters.gguf.imatrix import COUNTS, SUMS


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """Of one tensor. mean: mean squares of its input columns, fp32 [experts or 1, K]. tokens:
    that were seen, int64 [experts or 1]."""

    mean: Tensor
    tokens: Tensor


def write_imatrix(
    path: Path,
    known: Mapping[str, Importance],
    chunk: int,
    texts: Sequence[str] = (),
    *,
    older: bool = False,
) -> None:
    """known: by name of the tensor in GGUF; of all one is in memory at a time. chunk: tokens of a
    sequence. texts: where they are from. older: the form .dat. The same for the same numbers;
    OutputError where the disk refuses, and then there is no file."""
    with disk.refusing(f"write {path}", AGAIN):
        try:
            fd = disk.open_write(path)
            try:
                disk.truncate(fd, 0)
                _write(fd, (_dat if older else _gguf)(known, chunk, texts))
                disk.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            with suppress(OSError):
                disk.unlink(path)
            raise


def _write(fd: int, parts: Iterator[bytes]) -> None:
    end = 0
    for part in parts:
        disk.write_all(fd, memoryview(part), end)
        end += len(part)


def _chunks(most: int, chunk: int) -> int:
    return -(-most // chunk)


def _gguf(known: Mapping[str, Importance], chunk: int, texts: Sequence[str]) -> Iterator[bytes]:
    laid, most = list[Piece](), 0
    for name in sorted(known):
        pieces, tokens = _outline(name, known[name])
        laid += pieces
        most = max(most, tokens)
    fields: Fields = (
        ("general.type", "imatrix"),
        # An empty array has no type that a reader could go by.
        ("imatrix.datasets", tuple(texts) or ("",)),
        ("imatrix.chunk_count", _chunks(most, chunk)),
        ("imatrix.chunk_size", chunk),
    )
    yield map_file(laid, ["F32"] * len(laid), fields).head
    for name in sorted(known):
        yield from _rows(name, known[name])


def _outline(name: str, one: Importance) -> tuple[list[Piece], int]:
    """Its tensors' names and shapes, and the most tokens that were seen."""
    pieces = [Piece(x, (), tuple(values.shape)) for x, values in _tensors(name, one)]
    return pieces, int(one.tokens.max())


def _rows(name: str, one: Importance) -> Iterator[bytes]:
    for _, values in _tensors(name, one):
        data = _fp32(values)
        yield data
        yield bytes(padded(len(data)) - len(data))


def _tensors(name: str, one: Importance) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """Sums of squares [experts or 1, K], and how many they are [experts or 1, 1]."""
    counts = one.tokens[:, None]
    return (name + SUMS, one.mean.double() * counts), (name + COUNTS, counts)


def _dat(known: Mapping[str, Importance], chunk: int, texts: Sequence[str]) -> Iterator[bytes]:
    most = {name: int(known[name].tokens.max()) for name in sorted(known)}
    # One that no token reached has nothing to say in this file.
    yield struct.pack("<i", sum(tokens > 0 for tokens in most.values()))
    for name, tokens in most.items():
        if tokens > 0:
            yield from _entry(name, known[name], _chunks(tokens, chunk))
    chunks = _chunks(max(most.values(), default=0), chunk)
    yield struct.pack("<i", chunks) + _text(texts[-1] if texts else "")


def _entry(name: str, one: Importance, calls: int) -> Iterator[bytes]:
    mean = torch.where(one.tokens[:, None] > 0, one.mean, 1.0)
    yield _text(name) + struct.pack("<ii", calls, mean.numel())
    yield _fp32(mean * calls)


def _fp32(values: Tensor) -> bytes:
    return values.to(torch.float32).numpy().astype(np.dtype("<f4")).tobytes()


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<i", len(data)) + data
