"""Weights of a GGUF file, by the names and in the order of the checkpoint that it was made of.

Blocks are decoded one tensor at a time, or some rows of it, so that no more than one decoded weight
is in memory because of us.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.arch.text_config import text_config
from compress.checkpoint.reader import Checkpoint
from compress.checkpoint.shards.finite import NonFinite, find_nonfinite
from compress.errors import CheckpointError
from compress.formats.format import FileReader, Format
from compress.formats.gguf.decode import PLAIN
from compress.formats.gguf.matching import HeldTensor
from compress.formats.gguf.row import NAME
from compress.formats.table import FORMATS
from compress.formats.weights import DenseWeights
from compress.quant.blocks import BlockTensor, in_blocks

_SAID = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufWeights(DenseWeights):
    """An open GGUF file. Its checkpoint has the tensors as they are called and lie there.

    Numbers in blocks are fp32 when they are read, to the bit what ggml decodes; their minima are
    floats, which no QuantizedTensor has, so `quantized` knows none of them, and `blocks` does.
    held: of each tensor of the original where it lies.
    """

    held: Mapping[str, HeldTensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "GgufWeights":
        """CheckpointError for a file that is not of the model of the config.json beside it."""
        found = _reader().match(checkpoint)
        checkpoint = replace(checkpoint, config=found.config)
        return cls(checkpoint, found.spec, found.held)

    @property
    def format(self) -> Format:
        return FORMATS[NAME]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: held.shape for name, held in self.held.items()}

    @property
    def plain_dtype(self) -> torch.dtype:
        """The embedding's, or where that is in blocks config.json's."""
        kind = self.stored_in(self.spec.embedding)
        if kind in PLAIN:
            return PLAIN[kind]
        text = text_config(self.checkpoint.config)[1]
        return _SAID.get(str(text.get("dtype", text.get("torch_dtype"))), torch.bfloat16)

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
        values = _reader().decode(info.dtype, self._bytes(held, start, stop), stop - start)
        values = values if len(piece.shape) > 1 else values.reshape(-1)
        if check_finite:
            self._refuse_nonfinite(info.name, values, start)
        values = piece.original(values) if stop - start == rows else values
        return values - piece.added if piece.added else values

    def _bytes(self, held: HeldTensor, start: int, stop: int) -> Tensor:
        """uint8, of rows start..stop as the file has them."""
        first, width = held.place * held.nbytes, held.nbytes // _rows(held.piece.shape)
        return self.checkpoint.read_bytes(
            held.info.name, first + start * width, first + stop * width
        )

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
        return in_blocks(self.stored_in(f"{linear}.weight"))

    def nbytes(self, tensor: str) -> int:
        """What a tensor of the original takes in the file."""
        return self.held[tensor].nbytes

    def blocks(self, tensor: str, *, check_finite: bool = False) -> BlockTensor | None:
        held = self.held.get(tensor)
        if held is None or not in_blocks(held.info.dtype):
            return None
        rows = _rows(held.piece.shape)
        data = self._bytes(held, 0, rows).view(rows, -1)
        found = BlockTensor(held.info.dtype, held.piece.in_place(data))
        if check_finite and not found.is_finite:
            self.read(tensor, check_finite=True)  # which says where
        return found


def scan_gguf(checkpoint: Checkpoint) -> Iterator[tuple[str, NonFinite | None]]:
    """Reads every number of a file, a tensor or an expert at a time; yields each tensor, by its
    name in the file, with its faults."""
    decode = _reader().decode
    for name, info in checkpoint.tensors.items():
        experts = info.shape[0] if len(info.shape) > 2 else 1
        size = info.nbytes // experts
        found = None
        for start in range(0, info.nbytes, size):
            data = checkpoint.read_bytes(name, start, start + size)
            found = found or find_nonfinite(decode(info.dtype, data, _rows(info.shape)))
        yield name, found


def _reader() -> FileReader:
    """That of the row of FORMATS."""
    found = FORMATS[NAME].file
    assert found is not None
    return found


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
