"""Hidden states of the calibration set between two blocks, on disk.

One file holds [rows, length, hidden] in the compute dtype. Two files take turns: block i reads one
and writes the other, so a run that dies inside block i finds its inputs untouched, bit for bit.
Recomputing them instead would not be bit-stable, so the spill doubles as the journal. Files are
read with pread into fresh buffers: mapped pages would count as resident memory.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import disk
from compress.checkpoint.reading import read_into
from compress.errors import CheckpointError, OutputError


class HiddenStates:
    """A file of hidden states, read and written in runs of whole rows."""

    def __init__(self, path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        """shape: (rows, length, hidden). Nothing is opened before the first read or write."""
        self.path = path
        self.shape = shape
        self.dtype = dtype

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * self.shape[2] * self.dtype.itemsize

    def write(self, start: int, rows: Tensor) -> None:
        """Store rows [n, length, hidden] from row `start` on."""
        data = rows.detach().to("cpu", self.dtype).contiguous().reshape(-1).view(torch.uint8)
        with disk.refusing(f"write {self.path}"):
            fd = disk.open_write(self.path)
            try:
                disk.write_all(fd, data.numpy().data, start * self.row_bytes)
            finally:
                os.close(fd)

    def read(self, start: int, stop: int) -> Tensor:
        """Rows start..stop as [n, length, hidden] on the CPU."""
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        target = rows.reshape(-1).view(torch.uint8).numpy().data
        try:
            read_into(self.path, target, start * self.row_bytes)
        except CheckpointError as error:
            raise OutputError(f"{error}; remove {self.path.parent} and start again") from error
        return rows

    def flush(self) -> None:
        """Make what was written survive a power cut."""
        with disk.refusing(f"write {self.path}"):
            disk.fsync_path(self.path)
