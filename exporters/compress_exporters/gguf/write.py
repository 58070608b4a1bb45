"""A plan as a file: header, keys, the table of tensors, then their bytes, streamed."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from compress.checkpoint import disk
from compress.formats.gguf.fields import Value
from compress.quant.ggml_kinds import KINDS
from compress.report.units import counted, percent
from compress_exporters.exporter import AGAIN, Progress
from compress_exporters.gguf.data import Rounding, parts
from compress_exporters.gguf.plan import GgufPlan

if TYPE_CHECKING:
    from gguf import GGUFWriter

FILE = "model.gguf"
ALIGNMENT = 32  # of the bytes of every tensor, GGUF's default


def write_file(plan: GgufPlan, path: Path, progress: Progress) -> tuple[str, ...]:
    """Notes on what was rounded on the way. OutputError where the disk refuses."""
    rounding = Rounding()
    with disk.refusing(f"write {path}", AGAIN):
        _write_head(plan, path)
        _write_pieces(plan, path, progress, rounding)
    return tuple(_rounded(rounding))


def _write_pieces(plan: GgufPlan, path: Path, progress: Progress, rounding: Rounding) -> None:
    with path.open("ab") as stream:
        _pad(stream)
        for i, (piece, kind) in enumerate(zip(plan.pieces, plan.kinds, strict=True)):
            written = 0
            for part in parts(plan, piece, kind, rounding):
                stream.write(part.data)
                written += part.nbytes
            assert written == KINDS[kind].nbytes(piece.numel), piece.name
            _pad(stream)
            progress(piece.name, i + 1, len(plan.pieces))


def _rounded(rounding: Rounding) -> Iterator[str]:
    if rounding.changed:
        to = " and ".join(sorted(rounding.halves))
        yield f"{rounding.changed} of {rounding.total} dense numbers are rounded to {to}"
    for kind, lost in rounding.blocks.items():
        share = (lost.away / lost.whole) ** 0.5 if lost.whole else 0.0
        tensors = counted(lost.tensors, "tensor")
        yield f"rounding to {kind} lost {percent(share)} of the norm of {tensors}"


def _write_head(plan: GgufPlan, path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, plan.arch.name)
    for key, value in plan.fields[1:]:  # the writer itself adds the architecture
        _add(writer, key, value)
    for piece, name in zip(plan.pieces, plan.kinds, strict=True):
        kind = KINDS[name]
        writer.add_tensor_info(
            piece.name,
            piece.shape,
            np.dtype(np.float32),  # the kind counts
            kind.nbytes(piece.numel),
            raw_dtype=GGMLQuantizationType(kind.number),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _add(writer: "GGUFWriter", key: str, value: Value) -> None:
    if isinstance(value, tuple):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _pad(stream: BinaryIO) -> None:
    stream.write(bytes(-stream.tell() % ALIGNMENT))
