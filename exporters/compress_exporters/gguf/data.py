"""The numbers of a piece as bytes of its kind, a part at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.checkpoint.shards.dtype_codes import PLAIN_DTYPES
from compress.errors import CheckpointError
from compress.formats.gguf.blocks import encode
from compress.formats.gguf.layout import Piece
from compress.formats.weights import Weights
from compress.quant.ggml_kinds import KINDS
from compress_exporters.gguf.plan import GgufPlan, coded, dense
from compress_kernels import decode_blocks, round_blocks

# Numbers of a dense weight that are in memory at once.
PART = 1 << 23
HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {"F16": "fp16", "BF16": "bf16"}


@dataclass(slots=True)
class Lost:
    """Of numbers that were rounded into blocks of one type: their sum of squares, and that of what
    they lost."""

    tensors: int = 0
    whole: float = 0.0
    away: float = 0.0


@dataclass(slots=True)
class Rounding:
    """Numbers of dense weights that 16 bits change, of how many, in which dtypes; and what blocks
    cost, by type."""

    changed: int = 0
    total: int = 0
    halves: set[str] = field(default_factory=set)
    blocks: dict[str, Lost] = field(default_factory=dict)


def parts(
    plan: GgufPlan, piece: Piece, kind: str, rounding: Rounding
) -> Iterator[NDArray[np.uint8]]:
    """Bytes, one part after the other. CheckpointError for what fp16 cannot hold."""
    if piece.name in plan.fresh:
        yield from _fresh(plan, piece, kind, rounding)
    elif KINDS[kind].block > 1:
        for quantized in coded(plan.source, piece):
            yield encode(quantized, kind, piece.rows()).reshape(-1)
    else:
        for _, values in numbers(plan.source, piece):
            yield _plain(values, piece, kind, rounding)


def _fresh(
    plan: GgufPlan, piece: Piece, kind: str, rounding: Rounding
) -> Iterator[NDArray[np.uint8]]:
    """Rows have blocks of their own, so parts are as good as the whole."""
    lost = rounding.blocks.setdefault(kind, Lost())
    lost.tensors += 1
    row = 0  # of the piece's source
    for place, values in numbers(plan.source, piece):
        rows = values.reshape(-1, piece.shape[-1])
        data = _blocks(plan, piece, kind, RowsOfPiece(place, row, rows))
        row = (row + len(rows)) % piece.shape[-2]
        lost.whole += float(rows.square().sum(dtype=torch.float64))
        lost.away += float((decode_blocks(kind, data) - rows).square().sum(dtype=torch.float64))
        yield data.numpy().reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfPiece:
    """Rows of a piece, fp32 [n, K], of its source of that place, from that row of the file on."""

    place: int
    start: int
    rows: Tensor


def _blocks(plan: GgufPlan, piece: Piece, kind: str, part: RowsOfPiece) -> Tensor:
    """uint8 [n, bytes]: as they were rounded elsewhere, or rounded here."""
    if plan.given is None:
        importance = importance_of(plan, piece, part.place)
        return round_blocks(kind, part.rows.contiguous(), importance)
    name, order = piece.sources[part.place], piece.rows()
    if order is None:
        return plan.given.rows(name, part.start, part.start + len(part.rows))
    assert len(part.rows) == len(order), "rows that change places come all at once"
    return plan.given.rows(name, 0, len(order))[order].contiguous()


def importance_of(plan: GgufPlan, piece: Piece, place: int) -> Tensor | None:
    """Of the columns of the piece's source of that number: fp32 [K]."""
    known = plan.importance.get(piece.name)
    return None if known is None else known[place % len(known)]


def numbers(source: Weights, piece: Piece) -> Iterator[tuple[int, Tensor]]:
    """Which source of a dense piece it is, and its fp32 numbers in the order of the file, some rows
    at a time."""
    if piece.values:
        yield 0, torch.tensor(piece.values)
    for place, name in enumerate(piece.sources):
        if _as_they_are(source, piece, name):
            rows, width = piece.shape[-2], piece.shape[-1]
            step = max(1, PART // width)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                part = source.read_rows(name, start, stop, check_finite=True)
                yield place, part.float()
        else:
            yield place, dense(source, piece, name)


def _as_they_are(source: Weights, piece: Piece, name: str) -> bool:
    """Whether rows can be read one after the other."""
    info = source.checkpoint.tensors.get(name)
    plain = info is not None and info.dtype in PLAIN_DTYPES
    return piece.matrix and plain and piece.order == "as it is" and not piece.transposed


def _plain(values: Tensor, piece: Piece, kind: str, rounding: Rounding) -> NDArray[np.uint8]:
    if kind in HALVES:
        values = _halved(values, piece, kind, rounding)
    return values.contiguous().view(torch.uint8).numpy().reshape(-1)


def _halved(values: Tensor, piece: Piece, kind: str, rounding: Rounding) -> Tensor:
    halves = values.to(HALVES[kind])
    back = halves.float()
    # count_nonzero, as sum takes thirty times as long on booleans.
    if not bool(torch.isfinite(torch.stack(torch.aminmax(back))).all()):
        lost = int(torch.count_nonzero(torch.isinf(back)))
        raise CheckpointError(
            f"{lost} numbers of {piece.sources[0]} are too large for {NAMES[kind]}; write fp32"
        )
    changed = int(torch.count_nonzero(back != values))
    rounding.changed += changed
    rounding.halves |= {NAMES[kind]} if changed else set()
    rounding.total += values.numel()
    return halves
