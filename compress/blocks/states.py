"""Hidden states between two blocks: tensors of known shapes, in memory or in one file.

Files are read with pread into fresh buffers: mapped pages would count as resident memory.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from compress.checkpoint import disk
from compress.checkpoint.reading import read_into
from compress.errors import CheckpointError, OutputError

_PIECE = 4 << 20  # bytes


class HiddenStates:
    """A fixed list of CPU tensors of one dtype, each written and read by rows.

    They are kept or scratch. Kept ones are always a file, and what an interrupted run left in it is
    what the next one reads: to compute the states again would not be stable to the bit, so the file
    is part of the journal. Scratch ones end with the work that made them.
    """

    def __init__(
        self,
        path: Path,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        *,
        budget: int | None = None,
    ) -> None:
        """budget: None for kept states: nothing is opened before they are first written or read.
        Else they are scratch, in memory where all shapes together take at most so many bytes, in
        `path` where not, which is reserved at once: OutputError when the disk has no room for it.
        """
        self.path = path
        self.shapes = list(shapes)
        self.dtype = dtype
        self._kept = budget is None
        self._offsets = [0, *accumulate(prod(shape) * dtype.itemsize for shape in shapes)]
        self._memory: list[Tensor] | None = None
        if budget is None:
            return
        if self.nbytes <= budget:
            self._memory = [torch.empty(shape, dtype=dtype) for shape in shapes]
            return
        with disk.refusing(f"keep {self.nbytes} bytes of hidden states in {path}"):
            fd = disk.open_write(path)
            try:
                disk.fallocate(fd, self.nbytes)
            finally:
                os.close(fd)

    @property
    def nbytes(self) -> int:
        return self._offsets[-1]

    def write(self, index: int, value: Tensor, start: int = 0) -> None:
        """Store rows of a tensor from row `start` on, rounded to the dtype of the states."""
        shape = self.shapes[index]
        assert value.shape[1:] == shape[1:]
        assert start + len(value) <= shape[0]
        value = value.detach().to("cpu", self.dtype).contiguous()
        if self._memory is not None:
            self._memory[index][start : start + len(value)] = value
            return
        with disk.refusing(f"write {'' if self._kept else 'hidden states to '}{self.path}"):
            fd = disk.open_write(self.path)
            try:
                disk.write_all(fd, _bytes(value), self._offset(index, start))
            finally:
                os.close(fd)

    def read(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start..stop-1 (all by default) of a tensor, as a fresh tensor on the CPU."""
        shape = self.shapes[index]
        stop = shape[0] if stop is None else min(stop, shape[0])
        if self._memory is not None:
            return self._memory[index][start:stop].clone()
        value = torch.empty((stop - start, *shape[1:]), dtype=self.dtype)
        since = "after it was opened" if self._kept else "while it was in use"
        try:
            read_into(self.path, _bytes(value), self._offset(index, start), since)
        except CheckpointError as error:
            again = f"remove {self.path.parent} and start again"
            remedy = again if self._kept else "leave the work folder alone"
            raise OutputError(f"{error}; {remedy}") from error
        return value

    def pieces(self, index: int) -> Iterator[memoryview]:
        """The bytes of a tensor in order, some rows at a time."""
        shape = self.shapes[index]
        step = max(1, _PIECE // max(1, prod(shape[1:]) * self.dtype.itemsize))
        for start in range(0, shape[0], step):
            yield _bytes(self.read(index, start, start + step))

    def flush(self) -> None:
        """Make what was written of kept states survive a power cut."""
        assert self._kept, "nobody asks for scratch after a power cut"
        with disk.refusing(f"write {self.path}"):
            disk.fsync_path(self.path)

    def close(self) -> None:
        """Free the memory of scratch states, or remove their file: they end here."""
        assert not self._kept, "kept states outlive the work"
        if self._memory is None and self.path.exists():
            disk.unlink(self.path)
        self._memory = None

    def __enter__(self) -> "HiddenStates":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _offset(self, index: int, row: int) -> int:
        return self._offsets[index] + row * prod(self.shapes[index][1:]) * self.dtype.itemsize


def _bytes(value: Tensor) -> memoryview:
    return value.view(-1).view(torch.uint8).numpy().data
