"""A plan as a file: header, keys, the table of tensors, then their bytes, streamed."""

import os
from collections.abc import Iterator
from pathlib import Path

from compress.checkpoint import disk
from compress.quant.ggml_kinds import KINDS
from compress.report.units import counted, percent
from compress_exporters.exporter import AGAIN, Progress
from compress_exporters.gguf.data import Rounding, parts
from compress_exporters.gguf.head import FileMap
from compress_exporters.gguf.plan import GgufPlan

FILE = "model.gguf"


def write_file(plan: GgufPlan, path: Path, progress: Progress) -> tuple[str, ...]:
    """Notes on what was rounded on the way. OutputError where the disk refuses."""
    rounding, place = Rounding(), plan.map
    with disk.refusing(f"write {path}", AGAIN):
        fd = disk.open_write(path)
        try:
            disk.truncate(fd, 0)
            disk.fallocate(fd, place.size)
            _write_pieces(plan, place, fd, rounding, progress)
            disk.truncate(fd, place.size)
            # The last of all: no reader takes a file for whole that is not.
            disk.write_all(fd, memoryview(place.head), 0)
            disk.fsync(fd)
        finally:
            os.close(fd)
    return tuple(_rounded(rounding))


def _write_pieces(
    plan: GgufPlan, place: FileMap, fd: int, rounding: Rounding, progress: Progress
) -> None:
    for i, (piece, kind) in enumerate(zip(plan.pieces, plan.kinds, strict=True)):
        written = 0
        for part in parts(plan, piece, kind, rounding):
            disk.write_all(fd, part.data, place.starts[i] + written)
            written += part.nbytes
        assert written == KINDS[kind].nbytes(piece.numel), piece.name
        progress(piece.name, i + 1, len(plan.pieces))


def _rounded(rounding: Rounding) -> Iterator[str]:
    if rounding.changed:
        to = " and ".join(sorted(rounding.halves))
        yield f"{rounding.changed} of {rounding.total} dense numbers are rounded to {to}"
    for kind, lost in rounding.blocks.items():
        share = (lost.away / lost.whole) ** 0.5 if lost.whole else 0.0
        tensors = counted(lost.tensors, "tensor")
        yield f"rounding to {kind} lost {percent(share)} of the norm of {tensors}"
