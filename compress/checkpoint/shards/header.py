"""The header of a safetensors file, parsed without trust.

A file is 8 bytes (length of the header, little endian), the header (JSON: name -> dtype, shape,
data_offsets) and the data, to the last byte. Everything the header claims is checked against
everything else it claims and against the size of the file, so that later reads need no checks.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.checkpoint.reading import reading
from compress.checkpoint.regular import open_regular
from compress.checkpoint.shards.dtype_codes import ITEMSIZES, itemsize
from compress.errors import CheckpointError

MAX_HEADER = 100_000_000  # the limit of the safetensors library
LENGTH = 8  # bytes that say how long the header is
_MAX_DIMS = 64
_AGAIN = "download or copy it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes from byte `start` of `file` (name in the folder).

    dtype is a safetensors code ("BF16", "F32", "I32" ...).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def count_params(tensors: Iterable[TensorInfo]) -> int:
    """Elements of all tensors; of one that has two names, once."""
    places = {(info.file, info.start, info.numel) for info in tensors}
    return sum(numel for _, _, numel in places)


def main_dtype(tensors: Iterable[TensorInfo]) -> str:
    """Dtype code that most of the bytes are stored in."""
    sizes: Counter[str] = Counter()
    for info in tensors:
        sizes[info.dtype] += info.nbytes
    return max(sizes, key=sizes.__getitem__)


def read_header(path: Path, file: str) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, in the order in which their bytes lie.

    file: the name to put into TensorInfo. Raises CheckpointError for anything that is not true.
    """
    with reading(path), open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = _header_length(path, stream.read(LENGTH), size)
        raw = stream.read(length)
    if len(raw) < length:
        raise CheckpointError(f"{path} became shorter while it was read; {_AGAIN}")
    return parse_header(raw, path, file, size)


def parse_header(raw: bytes, path: Path, file: str, size: int) -> dict[str, TensorInfo]:
    """Tensors of a header `raw` (without its length) of a file of `size` bytes."""
    data = LENGTH + len(raw)
    entries = _parse_json(raw, path)
    _check_metadata(entries.pop("__metadata__", {}), path)
    infos = [_parse_entry(name, entry, path, file, data) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.start, info.nbytes))
    _check_cover(infos, path, data, size)
    return {info.name: info for info in infos}


def _header_length(path: Path, raw: bytes, size: int) -> int:
    if len(raw) < LENGTH:
        raise CheckpointError(
            f"{path} is truncated: {size} bytes is too short for a safetensors file; {_AGAIN}"
        )
    length = int.from_bytes(raw, "little")
    if raw.startswith(b"version "):
        raise CheckpointError(
            f"{path} is a git-lfs pointer, not the weights; fetch them with `git lfs pull`"
        )
    if length > MAX_HEADER or length < 2:
        raise CheckpointError(
            f"{path} is no safetensors file: its first 8 bytes give a header of {length} bytes"
            f" (2 to {MAX_HEADER} are possible)"
        )
    if LENGTH + length > size:
        raise CheckpointError(
            f"{path} is truncated: expected a header of {length} bytes, found"
            f" {size - LENGTH}; {_AGAIN}"
        )
    return length


def _parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path} is no safetensors file: its header does not start with '{{'")
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of {path} is not valid JSON: {error}") from error
    assert isinstance(entries, dict)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} appears twice")
    return found


def _check_metadata(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"the header of {path} has a __metadata__ that is not text to text")


def _parse_entry(name: str, entry: Any, path: Path, file: str, data: int) -> TensorInfo:
    where = f"tensor {name!r} in {path}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: the header must give dtype, shape and data_offsets")
    if not _encodable(name):
        raise CheckpointError(f"{where}: the name is not valid Unicode")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        known = ", ".join(ITEMSIZES)
        raise CheckpointError(f"{where} has dtype {dtype!r}; supported are {known}")
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise CheckpointError(f"{where} has shape {_short(shape)}; a list of sizes is expected")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {_short(offsets)}; two are expected")
    # Sizes of 0 hide how large the others are, and torch computes strides from those.
    if math.prod(max(n, 1) for n in shape) * itemsize(dtype) >= 1 << 63:
        raise CheckpointError(f"{where} has shape {_short(shape)}, larger than any memory")
    nbytes = math.prod(shape) * itemsize(dtype)
    begin, end = offsets
    if end - begin != nbytes:
        raise CheckpointError(
            f"{where}: {dtype} {_short(shape)} takes {nbytes} bytes, but its data_offsets"
            f" [{begin}, {end}] hold {end - begin}"
        )
    return TensorInfo(name, dtype, tuple(shape), file, data + begin, nbytes)


def _check_cover(infos: list[TensorInfo], path: Path, data: int, size: int) -> None:
    """The tensors must cover the data from its first to its last byte, each byte once."""
    end = data
    for info in infos:
        if info.start != end:
            fault = "overlaps the tensor before it" if info.start < end else "leaves a hole"
            raise CheckpointError(
                f"tensor {info.name!r} in {path} {fault}: it starts at byte {info.start - data}"
                f" of the data, expected {end - data}"
            )
        end += info.nbytes
    if size < end:
        raise CheckpointError(f"{path} is truncated: expected {end} bytes, found {size}; {_AGAIN}")
    if size > end:
        raise CheckpointError(
            f"{path} has {size - end} bytes that belong to no tensor: expected {end} bytes, found"
            f" {size}; {_AGAIN}"
        )


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _encodable(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]]) -> bytes:
    """Header with its length for name -> (dtype, shape, begin, end), offsets from the data's start.

    Padded with spaces so that the data starts at a multiple of 8 bytes.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape, begin, end) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(LENGTH, "little") + raw
