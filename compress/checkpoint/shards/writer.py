"""ShardWriter: safetensors files filled in any order, never readable before they are complete.

The header of each file is written last, by `finish`: until then its first 8 bytes are zero and no
reader takes it. Nothing here depends on what is in the files already, so a killed run may write
any tensor again.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import disk
from compress.checkpoint.index import INDEX
from compress.checkpoint.output.folder import free_bytes, write_atomic
from compress.checkpoint.shards.dtypes import DTYPE_CODES
from compress.checkpoint.shards.layout import ShardFile, ShardLayout
from compress.errors import OutputError

_LARGE = 1 << 20  # bytes that are worth a word to the disk


class ShardWriter:
    """Writes the tensors of a layout into a folder; make one with `create` or `reopen`."""

    def __init__(self, folder: Path, layout: ShardLayout) -> None:
        self.folder = folder
        self.layout = layout
        self.written: set[str] = set()
        self._rows: dict[str, int] = {}

    @classmethod
    def create(cls, folder: str | Path, layout: ShardLayout) -> "ShardWriter":
        """Reserve the files; OutputError when the disk has no room for all of them.

        May be repeated after a kill while nothing is recorded as written: what the files hold is
        kept, but one that is gone comes back as zeros.
        """
        folder = Path(folder)
        _require_space(folder, layout)
        for file in layout.files:
            with disk.refusing(f"reserve {file.size} bytes for {folder / file.name}"):
                _reserve(folder / file.name, file.size)
        with disk.refusing(f"write to {folder}"):
            disk.fsync_path(folder)
        return cls(folder, layout)

    @classmethod
    def reopen(cls, folder: str | Path, layout: ShardLayout) -> "ShardWriter":
        """Go on with the files that `create` made; OutputError when they are not those."""
        folder = Path(folder)
        for file in layout.files:
            path = folder / file.name
            found = path.stat().st_size if path.is_file() else None
            if found != file.size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise OutputError(
                    f"cannot resume: {path} {state}, expected {file.size} bytes; remove {folder}"
                    " and start again"
                )
        return cls(folder, layout)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor (any device, strides) at its place; dtype and shape must be the layout's."""
        info = self.layout.tensors[name]
        found = (DTYPE_CODES.get(tensor.dtype), tuple(tensor.shape))
        assert found == (info.dtype, info.shape), f"{name}: {found} does not fit {info}"
        self._put_tensor(info.file, tensor, info.start)
        self.written.add(name)

    def write_rows(self, name: str, start: int, rows: Tensor) -> None:
        """Put rows start.. of dimension 0 at their place; call in order, from row 0 to the last.

        The tensor counts as written with its last row.
        """
        info = self.layout.tensors[name]
        stop = start + rows.shape[0]
        found = (DTYPE_CODES.get(rows.dtype), tuple(rows.shape[1:]))
        assert found == (info.dtype, info.shape[1:]), f"{name}: {found} does not fit {info}"
        assert stop <= info.shape[0], f"{name}: row {stop} does not fit {info}"
        assert start in (0, self._rows.get(name)), f"{name}: row {start} is out of order"
        self._put_tensor(info.file, rows, info.start + start * (info.nbytes // info.shape[0]))
        self._rows[name] = stop
        if stop == info.shape[0]:
            self.written.add(name)

    def flush(self, names: Iterable[str]) -> None:
        """Force the files that hold these tensors to the disk."""
        for file in sorted({self.layout.tensors[name].file for name in names}):
            with disk.refusing(f"write {self.folder / file}"):
                disk.fsync_path(self.folder / file)

    def finish(self, written: Iterable[str] = ()) -> None:
        """Write headers and index and force all to the disk; may be repeated.

        written: tensors that an earlier, killed process wrote and flushed. Every tensor of the
        layout must have been written, by it or by this writer.
        """
        missing = self.layout.tensors.keys() - self.written - set(written)
        assert not missing, f"never written: {sorted(missing)[:5]}"
        for file in self.layout.files:
            self._seal(file)
        index = self.layout.index()
        if index is not None:
            write_atomic(self.folder / INDEX, index)
        with disk.refusing(f"write to {self.folder}"):
            disk.fsync_path(self.folder)

    def _seal(self, file: ShardFile) -> None:
        # Values first: a header on the disk then always stands before values that are there too.
        with disk.refusing(f"write {self.folder / file.name}"):
            disk.fsync_path(self.folder / file.name)
        self._put(file.name, memoryview(file.header), 0)
        with disk.refusing(f"write {self.folder / file.name}"):
            disk.fsync_path(self.folder / file.name)

    def _put_tensor(self, file: str, tensor: Tensor, offset: int) -> None:
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._put(file, flat.numpy().data, offset)

    def _put(self, file: str, data: memoryview, offset: int) -> None:
        with disk.refusing(f"write {self.folder / file}"):
            fd = disk.open_write(self.folder / file)
            try:
                disk.write_all(fd, data, offset)
                if len(data) >= _LARGE:
                    disk.begin_writeback(fd, offset, len(data))
            finally:
                os.close(fd)


def _require_space(folder: Path, layout: ShardLayout) -> None:
    """What the files do not have yet must fit into the free space."""
    present = sum(_allocated(folder / file.name, file.size) for file in layout.files)
    needed, free = layout.total_bytes - present, free_bytes(folder)
    if needed > free:
        raise OutputError(
            f"not enough disk space in {folder}: {needed} bytes are needed, {free} are free;"
            " make room or choose another disk"
        )


def _allocated(path: Path, size: int) -> int:
    return min(path.stat().st_blocks * 512, size) if path.is_file() else 0


def _reserve(path: Path, size: int) -> None:
    fd = disk.open_write(path)
    try:
        disk.truncate(fd, size)
        disk.fallocate(fd, size)
        disk.fsync(fd)
    finally:
        os.close(fd)
