"""Rounded weights on their way into a GGUF file: rows of blocks of every tensor, in one file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import disk
from compress.checkpoint.reading import read_into
from compress.errors import CheckpointError, OutputError
from compress.quant.ggml_kinds import KINDS


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where the rows of a tensor lie. start: of the first byte. width: bytes of a row."""

    start: int
    rows: int
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockFile:
    """places: by tensor of the checkpoint, whose rows [N, K] are in its own order.

    What a killed run has flushed is what the next one reads.
    """

    path: Path
    places: Mapping[str, BlockPlace]

    @property
    def nbytes(self) -> int:
        return sum(place.rows * place.width for place in self.places.values())

    def write(self, tensor: str, data: Tensor, row: int = 0) -> None:
        """data: uint8 [n, bytes], the rows from `row` on. OutputError where the disk refuses."""
        place = self.places[tensor]
        assert data.shape[1] == place.width, f"{tensor}: {tuple(data.shape)}"
        assert row + len(data) <= place.rows, f"{tensor}: {row} + {len(data)}"
        with disk.refusing(f"write {self.path}"):
            fd = disk.open_write(self.path)
            try:
                data = data.cpu().contiguous()
                disk.write_all(fd, _bytes(data), place.start + row * place.width)
            finally:
                os.close(fd)

    def flush(self) -> None:
        """Make what was written survive a power cut."""
        with disk.refusing(f"write {self.path}"):
            disk.fsync_path(self.path)

    def rows(self, tensor: str, start: int, stop: int) -> Tensor:
        """uint8 [stop - start, bytes]. OutputError where they are gone."""
        place = self.places[tensor]
        data = torch.empty(stop - start, place.width, dtype=torch.uint8)
        try:
            read_into(self.path, _bytes(data), place.start + start * place.width, "meanwhile")
        except CheckpointError as error:
            folder = self.path.parent
            raise OutputError(f"{error}; remove {folder} and start again") from error
        return data


def block_file(path: Path, weights: Mapping[str, tuple[str, tuple[int, int]]]) -> BlockFile:
    """weights: by name, kind (a key of KINDS) and shape (N, K) of each."""
    places, start = {}, 0
    for name, (kind, (rows, columns)) in weights.items():
        width = KINDS[kind].nbytes(columns)
        places[name] = BlockPlace(start, rows, width)
        start += rows * width
    return BlockFile(path, places)


def _bytes(data: Tensor) -> memoryview:
    return data.view(-1).numpy().data
