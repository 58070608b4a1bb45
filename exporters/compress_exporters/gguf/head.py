"""What stands before the data of a GGUF file: keys with their values, and the table of tensors.

Version 3 of docs/gguf.md of ggml; numbers are little endian. Everything follows from the plan, so
the size of a file is known before it is written.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compress.formats.gguf.fields import Fields, Value
from compress.formats.gguf.layout import Piece
from compress.quant.ggml_kinds import KINDS

ALIGNMENT = 32  # of the bytes of every tensor, GGUF's default
MAGIC, VERSION = b"GGUF", 3
# Numbers of the types of values.
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class FileMap:
    """head: all bytes before the data, padded. starts: of each piece from the file's beginning.
    size: of the file."""

    head: bytes
    starts: tuple[int, ...]
    size: int


def map_file(pieces: Sequence[Piece], kinds: Sequence[str], fields: Fields) -> FileMap:
    """kinds: of each piece, a key of KINDS."""
    sizes = [KINDS[kind].nbytes(x.numel) for x, kind in zip(pieces, kinds, strict=True)]
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += padded(size)
    table = zip(pieces, kinds, offsets, strict=True)
    head = b"".join(
        (
            MAGIC,
            struct.pack("<IQQ", VERSION, len(pieces), len(fields)),
            *(_text(key) + _value(value) for key, value in fields),
            *(_entry(*row) for row in table),
        )
    )
    head += bytes(padded(len(head)) - len(head))
    return FileMap(head, tuple(len(head) + x for x in offsets), len(head) + end)


def padded(size: int) -> int:
    """Up to where the next tensor begins."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _entry(piece: Piece, kind: str, offset: int) -> bytes:
    """Sizes go from the innermost on."""
    shape = piece.shape[::-1]
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(piece.name) + sizes + struct.pack("<IQ", KINDS[kind].number, offset)


def _value(value: Value) -> bytes:
    if not isinstance(value, tuple):
        number, content = _one(value)
        return struct.pack("<I", number) + content
    items = list(_items(value))
    kinds = {number for number, _ in items}
    assert len(kinds) == 1, f"an array of {kinds}"
    return struct.pack("<IIQ", ARRAY, kinds.pop(), len(items)) + b"".join(x for _, x in items)


def _items(values: Sequence[str | int | float]) -> Iterator[tuple[int, bytes]]:
    """Whole numbers of an array have a sign."""
    for value in values:
        whole = isinstance(value, int) and not isinstance(value, bool)
        yield (INT32, struct.pack("<i", value)) if whole else _one(value)


def _one(value: str | bool | int | float) -> tuple[int, bytes]:
    if isinstance(value, str):
        return STRING, _text(value)
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return UINT32, struct.pack("<I", value)
    return FLOAT32, struct.pack("<f", value)


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data
