"""Weights of a GGUF file, by the names and in the order of the checkpoint that it was made of.

Blocks are decoded one tensor at a time, or some rows of it, so that no more than one decoded weight
is in memory because of us.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from compress.arch.spec import BlockSpec, DecoderSpec
from compress.arch.text_config import text_config
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.finite import NonFinite, find_nonfinite
from compress.errors import CheckpointError
from compress.formats import conv1d
from compress.formats.format import Format
from compress.formats.gguf.matching import HeldTensor, match
from compress.formats.stored import Beside
from compress.quant.ggml_kinds import KINDS
from compress.quant.scheme import ActivationScheme, QuantScheme
from compress.quant.tensor import InputQuantization, OutlierColumns, QuantizedTensor
from compress_kernels import decode_blocks

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SAID = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """An open GGUF file. Its checkpoint has the tensors as they are called and lie there.

    Numbers in blocks are fp32 when they are read, to the bit what ggml decodes; their minima are
    floats, which no QuantizedTensor has, so `quantized` knows none of them.
    held: of each tensor of the original where it lies.
    """

    checkpoint: Checkpoint
    spec: DecoderSpec
    format: Format
    shapes: dict[str, tuple[int, ...]]
    held: Mapping[str, HeldTensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint, fmt: Format) -> "GgufWeights":
        """CheckpointError for a file that is not of the model of the config.json beside it."""
        found = match(checkpoint)
        checkpoint = replace(checkpoint, config=found.config)
        return cls(checkpoint, found.spec, fmt, found.shapes, found.held)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return (self.checkpoint,)

    @property
    def plain_dtype(self) -> torch.dtype:
        """The embedding's, or where that is in blocks config.json's."""
        kind = self.stored_in(self.spec.embedding)
        if kind in PLAIN:
            return PLAIN[kind]
        text = text_config(self.checkpoint.config)[1]
        return _SAID.get(str(text.get("dtype", text.get("torch_dtype"))), torch.bfloat16)

    @property
    def kv_cache(self) -> ActivationScheme | None:
        return None

    def with_checkpoint(self, checkpoint: Checkpoint) -> Self:
        return replace(self, checkpoint=checkpoint)

    def read(self, tensor: str, *, check_finite: bool = False) -> Tensor:
        held = self.held[tensor]
        return self._read(held, 0, _rows(held.piece.shape), check_finite=check_finite)

    def read_rows(
        self, tensor: str, start: int, stop: int, *, check_finite: bool = False
    ) -> Tensor:
        held = self.held[tensor]
        if held.piece.order != "as it is" or held.piece.transposed:
            return self.read(tensor, check_finite=check_finite)[start:stop]
        return self._read(held, start, stop, check_finite=check_finite)

    def _read(self, held: HeldTensor, start: int, stop: int, *, check_finite: bool) -> Tensor:
        """Rows start..stop of a tensor as the file has them, all where they change places."""
        info, piece = held.info, held.piece
        rows = _rows(piece.shape)
        width = held.nbytes // rows
        first = held.place * held.nbytes
        data = self.checkpoint.read_bytes(info.name, first + start * width, first + stop * width)
        values = _decoded(info.dtype, data, stop - start)
        values = values if len(piece.shape) > 1 else values.reshape(-1)
        if check_finite:
            self._refuse_nonfinite(info.name, values, start)
        values = piece.original(values) if stop - start == rows else values
        return values - piece.added if piece.added else values

    def _refuse_nonfinite(self, name: str, values: Tensor, start: int) -> None:
        bad = find_nonfinite(values)
        if bad is not None:
            raise CheckpointError(
                f"tensor {name!r} in {self.checkpoint.path / self.checkpoint.files[0]} has"
                f" {bad.below(start).describe()}; repair the file or download it again"
            )

    def stored_in(self, tensor: str) -> str | None:
        held = self.held.get(tensor)
        return None if held is None else held.info.dtype

    def is_quantized(self, linear: str) -> bool:
        kind = self.stored_in(f"{linear}.weight")
        return kind is not None and KINDS[kind].block > 1

    def nbytes(self, tensor: str) -> int:
        """What a tensor of the original takes in the file."""
        return self.held[tensor].nbytes

    def scheme(self, linear: str) -> QuantScheme | None:
        return None

    def transposed(self, linear: str) -> bool:
        return conv1d.by_config_or_family(self.checkpoint.config)(linear)

    def quantized(self, tensor: str) -> QuantizedTensor | None:
        return None

    def outlined(self, tensor: str) -> QuantizedTensor | None:
        return None

    def beside(self, linear: str) -> Beside:
        return Beside()

    def outliers(self, tensor: str) -> OutlierColumns | None:
        return None

    def outlier_columns(self, linear: str) -> int | None:
        return None

    def activation(self, linear: str) -> InputQuantization | None:
        return None

    def cache(self, block: BlockSpec) -> tuple[InputQuantization, InputQuantization] | None:
        return None


def scan_gguf(checkpoint: Checkpoint) -> Iterator[tuple[str, NonFinite | None]]:
    """Reads every number of a file, a tensor or an expert at a time; yields each tensor, by its
    name in the file, with its faults."""
    for name, info in checkpoint.tensors.items():
        experts = info.shape[0] if len(info.shape) > 2 else 1
        size = info.nbytes // experts
        found = None
        for start in range(0, info.nbytes, size):
            data = checkpoint.read_bytes(name, start, start + size)
            found = found or find_nonfinite(_decoded(info.dtype, data, _rows(info.shape)))
        yield name, found


def _decoded(kind: str, data: Tensor, rows: int) -> Tensor:
    """data: uint8 [bytes] of whole rows -> their numbers [rows, K], in 16 bits where they are
    stored so."""
    if kind in PLAIN:
        return data.view(PLAIN[kind]).view(rows, -1)
    return decode_blocks(kind, data.view(rows, -1))


def types_of(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Of each type of a file how many tensors are of it, and their numbers and bytes."""
    found: dict[str, Counter[str]] = {}
    for info in checkpoint.tensors.values():
        each = found.setdefault(info.dtype, Counter())
        each.update({"tensors": 1, "numbers": info.numel, "bytes": info.nbytes})
    return {kind: dict(found[kind]) for kind in sorted(found)}


def _rows(shape: tuple[int, ...]) -> int:
    """Of one source of a piece: the numbers of a vector count as rows."""
    return shape[-2] if len(shape) > 1 else shape[0]
