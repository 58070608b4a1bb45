"""A written file, read by the package `gguf` and compared with the checkpoint number by number."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.formats.gguf.layout import Piece
from compress.quant.ggml_kinds import KINDS
from compress.quant.tensor import QuantizedTensor
from compress.report.units import counted
from compress_exporters.gguf.data import numbers
from compress_exporters.gguf.plan import GgufPlan, coded
from compress_kernels import decode_blocks

if TYPE_CHECKING:
    from gguf import GGUFReader

# Of a code's worth: what rounding a scale, or a scale and an offset, can add up to, by bits.
SLACK = 2.0**-10
# What 16 bits change: relative, and absolute below normal numbers.
HALF: Mapping[str, tuple[float, float]] = {
    "F16": (2.0**-11, 2.0**-25),
    "BF16": (2.0**-8, 2.0**-133),
}
# Of a tensor's norm that rounding into blocks may lose. Q2_K loses 0.3 of random numbers, and rows
# of another tensor differ by 1.4.
LARGEST_LOSS = 0.8


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
    to = "16 bits" if "BF16" in plan.kinds else "fp16"
    how = "bit for bit" if plan.exact else f"up to the rounding to {to}"
    kept = len(names) - len(plan.fresh)
    lines: tuple[str, ...] = (
        f"gguf reads {kept} tensors back as they are in the checkpoint, {how}",
    )
    if plan.fresh:
        rounded = counted(len(plan.fresh), "tensor")
        line = f"gguf reads {rounded} back, rounded here; logits are held to those numbers"
        lines += (line,)
    return lines


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
    if piece.name in plan.fresh:
        _compare_rounded(plan, piece, kind, tensor)
        return
    for want, slack in _wanted(plan, piece, kind):
        want = want.reshape(-1, piece.shape[-1])
        got = _decoded(data[start : start + len(want)], tensor.tensor_type)
        start += len(want)
        # NaN is neither equal nor near.
        away = got != want if slack is None else ~((got - want).abs() <= slack)
        if bool(away.any()):
            raise _wrong(f"{int(away.sum())} numbers of {piece.name} are not the checkpoint's")


def _compare_rounded(plan: GgufPlan, piece: Piece, kind: str, tensor: Any) -> None:
    """Blocks as another reader decodes them against our own decoding, bit for bit, and against the
    numbers that went in."""
    start, whole, away = 0, 0.0, 0.0
    data = tensor.data.reshape(-1, tensor.data.shape[-1])
    for _, values in numbers(plan.source, piece):
        want = values.reshape(-1, piece.shape[-1])
        part = data[start : start + len(want)]
        got = _decoded(part, tensor.tensor_type)
        start += len(want)
        if not torch.equal(got, decode_blocks(kind, torch.from_numpy(part.copy()))):
            raise _wrong(f"{piece.name} is decoded to other numbers")
        whole += float(want.square().sum(dtype=torch.float64))
        away += float((got - want).square().sum(dtype=torch.float64))
    if not away <= LARGEST_LOSS**2 * whole:
        raise _wrong(f"{piece.name} is no rounding of the checkpoint's")


def _wanted(plan: GgufPlan, piece: Piece, kind: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """fp32 numbers in the order of the file, and how far from them the file's may be; None for not
    at all."""
    if KINDS[kind].block > 1:
        for quantized in coded(plan.source, piece):
            yield _exact(plan, piece, quantized)
        return
    for _, values in numbers(plan.source, piece):
        if kind not in HALF:
            yield values, None
            continue
        relative, least = HALF[kind]
        yield values, values.abs() * relative + least


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
