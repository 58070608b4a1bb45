"""Importance of columns as files that llama-quantize reads: GGUF, or the older .dat.

llama.cpp's pull request 9400 describes the first: of each tensor the sums of the squares of its
inputs, and of how many tokens they are. The second has means times calls, and how many calls.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compress.checkpoint import write_atomic
from compress.formats.gguf.fields import Fields
from compress.formats.gguf.layout import Piece
from compress_exporters.exporter import AGAIN
from compress_exporters.gguf.head import map_file
from compress_exporters.gguf.imatrix import COUNTS, SUMS

OLDER = ".dat"


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """Of one tensor. mean: mean squares of its input columns, fp32 [experts or 1, K]. tokens:
    that were seen, int64 [experts or 1]."""

    mean: Tensor
    tokens: Tensor


def write_imatrix(
    path: Path, known: Mapping[str, Importance], chunk: int, texts: Sequence[str] = ()
) -> None:
    """known: by name of the tensor in GGUF. chunk: tokens of a sequence. texts: where they are
    from. A name that ends in .dat gives the older file. It appears whole or not at all, the same
    for the same numbers; OutputError where the disk refuses."""
    ordered = dict(sorted(known.items()))
    chunks = max((_chunks(one, chunk) for one in ordered.values()), default=0)
    content = _dat if path.suffix == OLDER else _gguf
    write_atomic(path, content(ordered, chunk, chunks, texts), AGAIN)


def _chunks(one: Importance, chunk: int) -> int:
    return -(-int(one.tokens.max()) // chunk)


def _gguf(known: Mapping[str, Importance], chunk: int, chunks: int, texts: Sequence[str]) -> bytes:
    fields: Fields = (
        ("general.type", "imatrix"),
        # An empty array has no type that a reader could go by.
        ("imatrix.datasets", tuple(texts) or ("",)),
        ("imatrix.chunk_count", chunks),
        ("imatrix.chunk_size", chunk),
    )
    tensors = [x for name, one in known.items() for x in _tensors(name, one)]
    laid = [Piece(name, (), tuple(values.shape)) for name, values in tensors]
    place = map_file(laid, ["F32"] * len(laid), fields)
    content = bytearray(place.size)
    content[: len(place.head)] = place.head
    for start, (_, values) in zip(place.starts, tensors, strict=True):
        data = values.to(torch.float32).numpy().astype(np.dtype("<f4")).tobytes()
        content[start : start + len(data)] = data
    return bytes(content)


def _tensors(name: str, one: Importance) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """Sums of squares [experts or 1, K], and how many they are [experts or 1, 1]."""
    counts = one.tokens[:, None]
    return (name + SUMS, one.mean.double() * counts), (name + COUNTS, counts)


def _dat(known: Mapping[str, Importance], chunk: int, chunks: int, texts: Sequence[str]) -> bytes:
    out = BytesIO()
    # One that no token reached has nothing to say in this file.
    seen = {name: one for name, one in known.items() if int(one.tokens.max()) > 0}
    out.write(struct.pack("<i", len(seen)))
    for name, one in seen.items():
        calls = _chunks(one, chunk)
        mean = torch.where(one.tokens[:, None] > 0, one.mean, 1.0)
        out.write(_text(name) + struct.pack("<ii", calls, mean.numel()))
        out.write((mean * calls).numpy().astype(np.dtype("<f4")).tobytes())
    out.write(struct.pack("<i", chunks) + _text(texts[-1] if texts else ""))
    return out.getvalue()


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<i", len(data)) + data
