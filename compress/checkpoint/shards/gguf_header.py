"""The header of a GGUF file, parsed without trust.

A file is "GGUF", a version, two counts, keys with their values, the table of tensors (name, sizes
from the innermost on, type, offset), and the data. All numbers are little endian. Each tensor
begins where the one before it ends, rounded up to the alignment, as llama.cpp asks it. Everything
that the header claims is checked against that and against the size of the file.
Source: docs/gguf.md of ggml, version 3 (2 is laid out alike).
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, TypeAlias

from compress.checkpoint.reading import reading
from compress.checkpoint.regular import open_regular
from compress.checkpoint.shards.header import TensorInfo
from compress.errors import CheckpointError
from compress.quant.ggml_kinds import KINDS

SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 20
_MOST_DIMS, _MOST_NAME, _MOST_KEY = 4, 64, 65535  # that ggml takes
_AGAIN = "download or copy it again"
_STRING, _ARRAY = 8, 9
# The numbers of types of values -> how struct reads one.
_FORMATS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
# Types of tensors that ggml has and nothing here decodes.
_UNREAD: Mapping[int, str] = MappingProxyType(
    {
        **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
        **{21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
        **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
    }
)
_BY_NUMBER = MappingProxyType({kind.number: kind for kind in KINDS.values()})
Scalar: TypeAlias = str | bool | int | float


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """fields: keys with their values, lists left out. tensors: in the order of the file; their
    dtype is the name of a type in KINDS, their shape begins with the rows."""

    fields: Mapping[str, Scalar]
    tensors: dict[str, TensorInfo]


@dataclass(slots=True)
class _Cursor:
    """The bytes of a file in order. left: how many of its `size` are not read yet."""

    stream: BinaryIO
    path: Path
    size: int
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.size

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise CheckpointError(
                f"{self.path} is truncated: its header goes on behind the {self.size} bytes that"
                f" it has; {_AGAIN}"
            )
        found = self.stream.read(count)
        if len(found) < count:
            raise CheckpointError(f"{self.path} became shorter while it was read; {_AGAIN}")
        self.left -= count
        return found

    def number(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0])

    def count(self, what: str, least: int) -> int:
        """Of things that take `least` bytes each, at least."""
        found = self.number("Q")
        if found * least > self.left:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: its header says {found} {what}, and"
                f" {self.left} bytes follow; {_AGAIN}"
            )
        return found

    def text(self, what: str) -> str:
        raw = self.take(self.count(f"bytes of {what}", 1))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not valid UTF-8") from error


def read_gguf_header(path: Path, file: str) -> GgufHeader:
    """The header of a file. file: the name to put into TensorInfo. CheckpointError for anything
    that is not true, and for a type of tensor that cannot be decoded here, which it names."""
    with reading(path), open_regular(path) as stream:
        return _parse(_Cursor(stream, path, os.fstat(stream.fileno()).st_size), file)


def parse_gguf_header(raw: bytes, path: Path, file: str, size: int) -> GgufHeader:
    """The same of the bytes before the first tensor, of a file of `size` bytes."""
    return _parse(_Cursor(BytesIO(raw), path, size), file)


def _parse(cursor: _Cursor, file: str) -> GgufHeader:
    tensors, keys = _counts(cursor)
    fields: dict[str, Scalar] = {}
    seen: set[str] = set()
    for _ in range(keys):
        key = cursor.text("a key")
        if len(key) > _MOST_KEY:
            raise CheckpointError(
                f"{cursor.path} has a key of {len(key)} letters, {_MOST_KEY} are possible; {_AGAIN}"
            )
        if key in seen:
            raise CheckpointError(f"{cursor.path} has the key {key!r} twice; {_AGAIN}")
        seen.add(key)
        value = _value(cursor, key)
        if value is not None:
            fields[key] = value
    entries = [_entry(cursor) for _ in range(tensors)]
    return GgufHeader(fields, _placed(cursor, file, entries, _alignment(cursor.path, fields)))


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """How many tensors and keys there are."""
    path = cursor.path
    if cursor.size < 24 or (magic := cursor.take(4)) != _MAGIC:
        what = f"its first bytes are {magic!r}" if cursor.size >= 24 else f"{cursor.size} bytes"
        raise CheckpointError(f"{path} is no GGUF file: {what}; {_AGAIN}")
    version = cursor.number("I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        why = "it is big-endian" if swapped else f"it has version {version}"
        raise CheckpointError(f"{path}: {why}; GGUF of version 2 and 3, little-endian, is read")
    # A tensor's entry has 24 bytes at least, a key's 13.
    return cursor.count("tensors", 24), cursor.count("keys", 13)


def _value(cursor: _Cursor, key: str) -> Scalar | None:
    """None for a list, which is read over."""
    kind = cursor.number("I")
    if kind == _STRING:
        return cursor.text(f"the value of {key!r}")
    if kind == _ARRAY:
        _skip_list(cursor, key)
        return None
    return _scalar(cursor, key, kind)


def _scalar(cursor: _Cursor, key: str, kind: int) -> Scalar:
    code = _code(cursor, key, kind)
    found: Scalar = struct.unpack(f"<{code}", cursor.take(struct.calcsize(f"<{code}")))[0]
    return found


def _code(cursor: _Cursor, key: str, kind: int) -> str:
    if kind not in _FORMATS:
        raise CheckpointError(
            f"{cursor.path}: the value of {key!r} has type {kind}, which GGUF does not have; it is"
            f" damaged, {_AGAIN}"
        )
    return _FORMATS[kind]


def _skip_list(cursor: _Cursor, key: str) -> None:
    kind = cursor.number("I")
    if kind == _STRING:
        for _ in range(cursor.count(f"entries of {key!r}", 8)):
            cursor.take(cursor.count(f"bytes of {key!r}", 1))
        return
    width = struct.calcsize(f"<{_code(cursor, key, kind)}")
    cursor.take(width * cursor.count(f"entries of {key!r}", width))


def _alignment(path: Path, fields: Mapping[str, Scalar]) -> int:
    found = fields.get("general.alignment", _ALIGNMENT)
    whole = isinstance(found, int) and not isinstance(found, bool)
    if not whole or not 0 < int(found) <= _MOST_ALIGNMENT or int(found) & int(found) - 1:
        raise CheckpointError(
            f"{path}: general.alignment is {found!r}; it is a power of two, {_ALIGNMENT} by default"
        )
    return int(found)


@dataclass(frozen=True, slots=True)
class _Entry:
    """shape: rows first. kind: number of its type. offset: from where the data begins."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _entry(cursor: _Cursor) -> _Entry:
    name = cursor.text("the name of a tensor")
    where = f"tensor {name!r} in {cursor.path}"
    if not 0 < len(name.encode()) <= _MOST_NAME:
        raise CheckpointError(f"{where} has a name that ggml does not take; {_AGAIN}")
    dims = cursor.number("I")
    if not 1 <= dims <= _MOST_DIMS:
        raise CheckpointError(f"{where} has {dims} dimensions; ggml has 1 to {_MOST_DIMS}")
    shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
    return _Entry(name, shape, cursor.number("I"), cursor.number("Q"))


def _placed(
    cursor: _Cursor, file: str, entries: list[_Entry], alignment: int
) -> dict[str, TensorInfo]:
    """Where each tensor lies; every byte of the data is one's, or fills up to the alignment."""
    path, at = cursor.path, cursor.size - cursor.left
    data = at + -at % alignment
    found: dict[str, TensorInfo] = {}
    begin = end = 0
    for entry in entries:
        begin = end + -end % alignment
        where = f"tensor {entry.name!r} in {path}"
        if entry.name in found:
            raise CheckpointError(f"{where} is there twice; {_AGAIN}")
        if entry.offset != begin:
            raise CheckpointError(
                f"{where} lies at byte {entry.offset} of the data, and the tensors before it end at"
                f" {begin}; the file is damaged, {_AGAIN}"
            )
        kind, nbytes = _sized(entry, where)
        end = begin + nbytes
        found[entry.name] = TensorInfo(entry.name, kind, entry.shape, file, data + begin, nbytes)
    if data + end > cursor.size:
        raise CheckpointError(
            f"{path} is truncated: expected {data + end} bytes, found {cursor.size}; {_AGAIN}"
        )
    if cursor.size > data + end + -end % alignment and entries:
        raise CheckpointError(
            f"{path} has {cursor.size - data - end} bytes that belong to no tensor; {_AGAIN}"
        )
    return found


def _sized(entry: _Entry, where: str) -> tuple[str, int]:
    """Name of the type, and the bytes that the tensor takes."""
    kind = _BY_NUMBER.get(entry.kind)
    if kind is None:
        name = _UNREAD.get(entry.kind)
        told = f"of the type {name}" if name else f"of type {entry.kind}, which ggml did not have"
        raise CheckpointError(
            f"{where} is {told}; {', '.join(KINDS)} can be read, so take a file of those"
        )
    if math.prod(max(n, 1) for n in entry.shape) >= 1 << 60:
        raise CheckpointError(f"{where} has shape {list(entry.shape)}, larger than any memory")
    if entry.shape[-1] % kind.block or 0 in entry.shape:
        raise CheckpointError(
            f"{where} has shape {list(entry.shape)}, and {kind.name} has rows of whole blocks of"
            f" {kind.block}; {_AGAIN}"
        )
    return kind.name, kind.nbytes(math.prod(entry.shape))
