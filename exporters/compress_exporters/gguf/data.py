"""The numbers of a piece as bytes of its kind, a part at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.checkpoint.shards.dtype_codes import PLAIN_DTYPES
from compress.errors import CheckpointError
from compress.formats.weights import Weights
from compress.quant.ggml_kinds import KINDS
from compress_exporters.gguf.blocks import encode
from compress_exporters.gguf.layout import Piece
from compress_exporters.gguf.plan import coded, dense

# Numbers of a dense weight that are in memory at once.
PART = 1 << 23


@dataclass(slots=True)
class Rounding:
    """Numbers of dense weights that fp16 changes, of how many."""

    changed: int = 0
    total: int = 0


def parts(
    source: Weights, piece: Piece, kind: str, rounding: Rounding
) -> Iterator[NDArray[np.uint8]]:
    """Bytes, one part after the other. CheckpointError for what fp16 cannot hold."""
    if KINDS[kind].block > 1:
        for quantized in coded(source, piece):
            yield encode(quantized, kind, piece.rows()).reshape(-1)
        return
    for values in numbers(source, piece):
        yield _plain(values, piece, kind, rounding)


def numbers(source: Weights, piece: Piece) -> Iterator[Tensor]:
    """fp32 numbers of a dense piece in the order of the file, some rows at a time."""
    if piece.values:
        yield torch.tensor(piece.values)
    for name in piece.sources:
        if _as_they_are(source, piece, name):
            rows, width = piece.shape[-2], piece.shape[-1]
            step = max(1, PART // width)
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                yield source.read_rows(name, start, stop, check_finite=True).float()
        else:
            yield dense(source, piece, name)


def _as_they_are(source: Weights, piece: Piece, name: str) -> bool:
    """Whether rows can be read one after the other."""
    info = source.checkpoint.tensors.get(name)
    plain = info is not None and info.dtype in PLAIN_DTYPES
    return piece.matrix and plain and piece.order == "as it is" and not piece.transposed


def _plain(values: Tensor, piece: Piece, kind: str, rounding: Rounding) -> NDArray[np.uint8]:
    if kind == "F16":
        values = _halved(values, piece, rounding)
    return values.contiguous().numpy().reshape(-1).view(np.uint8)


def _halved(values: Tensor, piece: Piece, rounding: Rounding) -> Tensor:
    halves = values.to(torch.float16)
    back = halves.float()
    # count_nonzero, as sum takes thirty times as long on booleans.
    if not bool(torch.isfinite(torch.stack(torch.aminmax(back))).all()):
        lost = int(torch.count_nonzero(torch.isinf(back)))
        raise CheckpointError(
            f"{lost} numbers of {piece.sources[0]} are too large for fp16; write fp32"
        )
    rounding.changed += int(torch.count_nonzero(back != values))
    rounding.total += values.numel()
    return halves
