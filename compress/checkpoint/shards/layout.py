"""ShardLayout: which tensor goes to which byte of which file, known before any work.

Everything about the output files but the values follows from names, dtypes and shapes. So disk
space is reserved and the exact size is known up front, and tensors may be written in any order
and again after a crash: the bytes are the same.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compress.checkpoint.index import SINGLE
from compress.checkpoint.shards.dtype_codes import itemsize
from compress.checkpoint.shards.header import TensorInfo, build_header

Entry = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One output file: its header bytes (length included), its tensors and its exact size."""

    name: str
    header: bytes
    tensors: tuple[TensorInfo, ...]
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """All output files of a checkpoint."""

    files: tuple[ShardFile, ...]
    tensors: dict[str, TensorInfo]

    @property
    def total_bytes(self) -> int:
        """Exact size of all safetensors files, headers included."""
        return sum(file.size for file in self.files)

    def index(self) -> bytes | None:
        """Contents of model.safetensors.index.json; None for a single file, which needs none."""
        if len(self.files) == 1:
            return None
        weight_map = {name: self.tensors[name].file for name in sorted(self.tensors)}
        total = sum(info.nbytes for info in self.tensors.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def plan_shards(entries: Iterable[Entry], max_bytes: int) -> ShardLayout:
    """Lay out tensors given as (name, dtype code, shape), in order, into files.

    A file takes tensors until the next one would bring their bytes (the header not counted) over
    `max_bytes`; a tensor larger than that gets a file of its own.
    """
    shards = _split(list(entries), max_bytes)
    names = _names(len(shards))
    files = tuple(_lay_out(name, shard) for name, shard in zip(names, shards, strict=True))
    tensors = {info.name: info for file in files for info in file.tensors}
    assert len(tensors) == sum(len(file.tensors) for file in files), "a tensor name appears twice"
    return ShardLayout(files, tensors)


def single_file(name: str, entries: Iterable[Entry]) -> ShardLayout:
    """All tensors in one file of that name, whatever its size."""
    file = _lay_out(name, list(entries))
    return ShardLayout((file,), {info.name: info for info in file.tensors})


def nbytes(entry: Entry) -> int:
    """Bytes of the values of an entry."""
    return math.prod(entry[2]) * itemsize(entry[1])


def _split(entries: list[Entry], max_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = nbytes(entry)
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += size
    return shards


def _names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _lay_out(name: str, shard: Sequence[Entry]) -> ShardFile:
    # Wide dtypes first, as the safetensors library does: then every tensor of a mapped file is
    # aligned to its element size, whatever odd sizes lie before it.
    ordered = sorted(shard, key=lambda entry: -itemsize(entry[1]))
    offsets: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    end = 0
    for tensor, dtype, shape in ordered:
        begin, end = end, end + nbytes((tensor, dtype, shape))
        offsets[tensor] = (dtype, shape, begin, end)
    header = build_header(offsets)
    data = len(header)
    infos = tuple(
        TensorInfo(tensor, dtype, shape, name, data + begin, stop - begin)
        for tensor, (dtype, shape, begin, stop) in offsets.items()
    )
    return ShardFile(name, header, infos, data + end)
