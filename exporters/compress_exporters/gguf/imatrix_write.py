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

from compress.checkpoint import disk
from compress_exporters.exporter import AGAIN


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
    from. A name that ends in .dat gives the older file. OutputError where the disk refuses."""
    ordered = dict(sorted(known.items()))
    chunks = max((_chunks(one, chunk) for one in ordered.values()), default=0)
    with disk.refusing(f"write {path}", AGAIN):
        if path.suffix == ".dat":
            path.write_bytes(_dat(ordered, chunk, chunks, texts))
        else:
            _write_gguf(path, ordered, chunk, chunks, texts)


def _chunks(one: Importance, chunk: int) -> int:
    return -(-int(one.tokens.max()) // chunk)


def _write_gguf(
    path: Path, known: Mapping[str, Importance], chunk: int, chunks: int, texts: Sequence[str]
) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    if texts:
        writer.add_array("imatrix.datasets", list(texts))
    else:  # an empty array has no type that a reader could go by
        writer.add_array("imatrix.datasets", [""])
    writer.add_uint32("imatrix.chunk_count", chunks)
    writer.add_uint32("imatrix.chunk_size", chunk)
    for name, one in known.items():
        sums = one.mean.double() * one.tokens[:, None]
        writer.add_tensor(f"{name}.in_sum2", sums.to(torch.float32).numpy())
        writer.add_tensor(f"{name}.counts", one.tokens.to(torch.float32).numpy()[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
