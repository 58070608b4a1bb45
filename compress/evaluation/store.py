"""Tensors of known shapes, kept in memory while they fit a budget and in one file where not.

Files are read with pread into fresh buffers: mapped pages would count as resident memory.
"""

import os
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from compress.checkpoint import disk
from compress.errors import OutputError


class TensorStore:
    """A fixed list of CPU tensors of one dtype, each written and read by rows."""

    def __init__(
        self, path: Path, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, budget: int
    ) -> None:
        """path: file to use if all shapes together take more than `budget` bytes.

        OutputError when the disk has no room for it.
        """
        self.shapes = list(shapes)
        self.dtype = dtype
        self._offsets = [0, *accumulate(prod(shape) * dtype.itemsize for shape in shapes)]
        self._memory: list[Tensor] | None = None
        self._fd = -1
        self.path: Path | None = None
        if self.nbytes <= budget:
            self._memory = [torch.empty(shape, dtype=dtype) for shape in shapes]
            return
        with disk.refusing(f"keep {self.nbytes} bytes of hidden states in {path}"):
            self._fd = disk.open_write(path)
            self.path = path
            disk.fallocate(self._fd, self.nbytes)

    @property
    def nbytes(self) -> int:
        return self._offsets[-1]

    def write(self, index: int, value: Tensor, start: int = 0) -> None:
        """Store rows of a tensor from row `start` on, rounded to the store's dtype."""
        shape = self.shapes[index]
        assert value.shape[1:] == shape[1:]
        assert start + len(value) <= shape[0]
        value = value.detach().to("cpu", self.dtype).contiguous()
        if self._memory is not None:
            self._memory[index][start : start + len(value)] = value
            return
        with disk.refusing(f"write hidden states to {self.path}"):
            disk.write_all(self._fd, _bytes(value), self._offset(index, start))

    def read(self, index: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start..stop-1 (all by default) of a tensor, as a fresh tensor."""
        shape = self.shapes[index]
        stop = shape[0] if stop is None else min(stop, shape[0])
        if self._memory is not None:
            return self._memory[index][start:stop].clone()
        value = torch.empty((stop - start, *shape[1:]), dtype=self.dtype)
        self._fill(_bytes(value), self._offset(index, start))
        return value

    def _offset(self, index: int, row: int) -> int:
        return self._offsets[index] + row * prod(self.shapes[index][1:]) * self.dtype.itemsize

    def _fill(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:
                raise OutputError(
                    f"{self.path} became shorter while it was in use; leave the work folder alone"
                )
            done += got

    def close(self) -> None:
        """Free the memory, or remove the file. Reading and writing end here."""
        self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self.path is not None and self.path.exists():
            disk.unlink(self.path)

    def __enter__(self) -> "TensorStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _bytes(value: Tensor) -> memoryview:
    return value.view(-1).view(torch.uint8).numpy().data
