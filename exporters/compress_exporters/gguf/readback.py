"""A written file, read by the package `gguf` and compared with the checkpoint number by number."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.quant.ggml_kinds import KINDS
from compress.quant.tensor import QuantizedTensor
from compress_exporters.gguf.data import numbers
from compress_exporters.gguf.layout import Piece
from compress_exporters.gguf.plan import GgufPlan, coded

if TYPE_CHECKING:
    from gguf import GGUFReader

# Of a code's worth: what rounding a scale, or a scale and an offset, can add up to, by bits.
SLACK = 2.0**-10
HALF, TINY = 2.0**-11, 2.0**-25  # fp16's: relative, and absolute below its normal numbers


def read_back(plan: GgufPlan, path: Path) -> tuple[str, ...]:
    """What was compared. CheckpointError for any difference beyond fp16's rounding."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    _check_fields(plan, reader)
    found = {tensor.name: tensor for tensor in reader.tensors}
    names = [piece.name for piece in plan.pieces]
    if list(found) != names:
        raise _wrong(f"it has {len(found)} tensors, {len(names)} are meant")
    for piece, kind in zip(plan.pieces, plan.kinds, strict=True):
        tensor = found[piece.name]
        shape = tuple(int(x) for x in tensor.shape[::-1])
        if (shape, int(tensor.tensor_type)) != (piece.shape, KINDS[kind].number):
            raise _wrong(f"{piece.name} is {tensor.tensor_type.name} {shape}")
        _compare(plan, piece, kind, tensor)
    how = "bit for bit" if plan.exact else "up to the rounding to fp16"
    return (f"gguf reads {len(names)} tensors back as they are in the checkpoint, {how}",)


def _check_fields(plan: GgufPlan, reader: "GGUFReader") -> None:
    for key, value in plan.fields:
        field = reader.get_field(key)
        stored = None if field is None else field.contents()
        if not _same(stored, value):
            raise _wrong(f"{key} is {str(stored)[:60]!r}")


def _same(stored: Any, value: Any) -> bool:
    if isinstance(value, tuple):
        many = isinstance(stored, list) and len(stored) == len(value)
        return many and all(_same(x, y) for x, y in zip(stored, value, strict=True))
    if isinstance(value, float):
        return bool(float(torch.tensor(value, dtype=torch.float32)) == stored)
    return bool(stored == value)


def _compare(plan: GgufPlan, piece: Piece, kind: str, tensor: Any) -> None:
    """Rows of the file against those of the checkpoint, a part at a time."""
    start = 0
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    for want, slack in _wanted(plan, piece, kind):
        want = want.reshape(-1, piece.shape[-1])
        got = _decoded(data[start : start + len(want)], tensor.tensor_type)
        start += len(want)
        # NaN is neither equal nor near.
        away = got != want if slack is None else ~((got - want).abs() <= slack)
        if bool(away.any()):
            raise _wrong(f"{int(away.sum())} numbers of {piece.name} are not the checkpoint's")


def _wanted(plan: GgufPlan, piece: Piece, kind: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """fp32 numbers in the order of the file, and how far from them the file's may be; None for not
    at all."""
    if KINDS[kind].block > 1:
        for quantized in coded(plan.source, piece):
            yield _exact(plan, piece, quantized)
        return
    for values in numbers(plan.source, piece):
        yield values, values.abs() * HALF + TINY if kind == "F16" else None


def _exact(
    plan: GgufPlan, piece: Piece, quantized: QuantizedTensor
) -> tuple[Tensor, Tensor | None]:
    rows = piece.rows()
    values, slack = quantized.dequantize(torch.float32), None
    if plan.rounded.changed:
        slack = quantized.steps().abs() * 2.0**quantized.scheme.bits * SLACK
        slack = slack.expand_as(values)
        slack = slack if rows is None else slack[rows]
    return values if rows is None else values[rows], slack


def _decoded(data: Any, kind: Any) -> Tensor:
    from gguf import dequantize

    return torch.from_numpy(dequantize(data, kind).copy())


def _wrong(what: str) -> CheckpointError:
    return CheckpointError(f"the file does not read back: {what}; please report this")
