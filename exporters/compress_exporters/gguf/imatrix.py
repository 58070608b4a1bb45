"""Importance of columns as llama.cpp's llama-imatrix writes it: in a GGUF file, or the older .dat.

Of each tensor a file has the sum of the squares of every input column, and how often it was
seen. Importance is their mean: what the squared error of a column's weights weighs.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from compress.errors import DataError
from compress.formats.gguf.layout import Piece

SUMS, COUNTS = ".in_sum2", ".counts"
_LONGEST = 512  # of a name in a .dat file, and more than any tensor's


def read_imatrix(path: Path) -> Mapping[str, Tensor]:
    """By name of the tensor in GGUF: fp32 [experts or 1, K]. DataError for what is no such file."""
    try:
        with path.open("rb") as stream:
            is_gguf = stream.read(4) == b"GGUF"
            stream.seek(0)
            return dict(_from_gguf(path) if is_gguf else _from_dat(stream))
    except OSError as error:
        raise DataError(f"--imatrix {path} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error, KeyError, IndexError, UnicodeDecodeError) as error:
        raise DataError(
            f"--imatrix {path} is no importance matrix; give a file that llama-imatrix wrote"
        ) from error


def _from_gguf(path: Path) -> Iterator[tuple[str, Tensor]]:
    from gguf import GGUFReader

    stored = {x.name: x.data for x in GGUFReader(path).tensors}
    sums = [name for name in stored if name.endswith(SUMS)]
    if not sums:
        raise ValueError(path)
    for name in sums:
        tensor = name.removesuffix(SUMS)
        counts = np.asarray(stored[tensor + COUNTS], dtype=np.float32).reshape(-1, 1)
        values = np.asarray(stored[name], dtype=np.float32).reshape(len(counts), -1)
        # An expert that no token chose has no sum: its columns weigh alike.
        mean = np.where(counts > 0, values / np.maximum(counts, 1), 1.0)
        yield tensor, torch.from_numpy(mean.astype(np.float32))


def _from_dat(stream: BinaryIO) -> Iterator[tuple[str, Tensor]]:
    """Number of entries; of each the length of its name, the name, calls, number of values, sums
    over the calls. Whole numbers are int32, values fp32, little-endian."""
    (entries,) = struct.unpack("<i", stream.read(4))
    if not 0 < entries < 1 << 20:
        raise ValueError(entries)
    for _ in range(entries):
        (length,) = struct.unpack("<i", stream.read(4))
        if not 0 < length <= _LONGEST:
            raise ValueError(length)
        name = stream.read(length).decode()
        calls, count = struct.unpack("<ii", stream.read(8))
        values = np.frombuffer(stream.read(4 * count), dtype="<f4") / max(calls, 1)
        if values.size != count or count < 1:
            raise ValueError(name)
        yield name, torch.from_numpy(values.astype(np.float32)).view(1, -1)


def matched(
    pieces: Sequence[Piece], fresh: frozenset[str], known: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """Of the rounded pieces that the file knows: fp32 [experts or 1, K]. DataError where it is of
    another model, or holds what is no weight."""
    found: dict[str, Tensor] = {}
    for piece in pieces:
        values = known.get(piece.name)
        if piece.name not in fresh or values is None:
            continue
        experts, columns = len(piece.sources), piece.shape[-1]
        if values.numel() == experts * columns:
            values = values.reshape(experts, columns)
        if values.shape[-1] != columns or len(values) not in (1, experts):
            raise DataError(
                f"--imatrix {path} has {values.shape[-1]} numbers for {piece.name}, whose rows have"
                f" {columns}; it is of another model"
            )
        if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
            raise DataError(f"--imatrix {path} has numbers for {piece.name} that are no weights")
        found[piece.name] = values
    if not found:
        raise DataError(f"--imatrix {path} knows no tensor of this model; it is of another")
    return found
