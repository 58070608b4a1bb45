"""The weights that a written file holds, as a checkpoint's: what a proof is held to where dense
numbers were rounded into blocks."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.formats.gguf.layout import ENDS, Piece
from compress.formats.weights import DenseWeights, Weights
from compress_exporters.decoded import decoded
from compress_exporters.gguf.plan import GgufPlan

if TYPE_CHECKING:
    from gguf import ReaderTensor


@dataclass(frozen=True, slots=True)
class InFile(DenseWeights):
    """A source whose rounded weights are those of a file, read by the package gguf.

    rounded: by name in the checkpoint, the tensor of the file and which of its parts.
    """

    source: Weights = field(kw_only=True)
    rounded: dict[str, tuple["ReaderTensor", Piece, int]] = field(kw_only=True)

    @classmethod
    def of(cls, plan: GgufPlan, path: Path) -> "InFile":
        from gguf import GGUFReader

        source, found = plan.source, {}
        stored = {x.name: x for x in GGUFReader(path).tensors}
        # The embedding's own numbers count where a head repeats it.
        for piece in reversed(plan.pieces):
            if piece.name in plan.fresh:
                for place, name in enumerate(piece.sources):
                    found[name] = (stored[piece.name], piece, place)
        head, embedding = source.spec.head, source.spec.embedding
        if head is not None and not any(x.name == ENDS[1] for x in plan.pieces):
            found |= {head: found[embedding]} if embedding in found else {}
        return cls(_in_fp32(source.checkpoint, found), source.spec, source=source, rounded=found)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.source.shapes

    @property
    def plain_dtype(self) -> torch.dtype:
        return self.source.plain_dtype

    def with_checkpoint(self, checkpoint: Checkpoint) -> Self:
        source = self.source.with_checkpoint(checkpoint)
        kept = _in_fp32(checkpoint, self.rounded)
        return replace(self, checkpoint=kept, source=source)

    def read(self, tensor: str, *, check_finite: bool = False) -> Tensor:
        if tensor not in self.rounded:
            return decoded(self.source, tensor)
        stored, piece, place = self.rounded[tensor]
        return piece.original(_part(stored, piece, place))

    def read_rows(
        self, tensor: str, start: int, stop: int, *, check_finite: bool = False
    ) -> Tensor:
        return self.read(tensor)[start:stop]

    def transposed(self, linear: str) -> bool:
        return self.source.transposed(linear)


def _in_fp32(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """What counts as fp32 there: who loads dense weights keeps them in the dtype that they have."""
    tensors = dict(checkpoint.tensors)
    for name in names:
        tensors[name] = replace(tensors[name], dtype="F32")
    return replace(checkpoint, tensors=tensors)


def _part(stored: Any, piece: Piece, place: int) -> Tensor:
    """fp32 [N, K] of one source: of one expert, where there are several."""
    from gguf import dequantize

    data = stored.data.reshape(-1, stored.data.shape[-1])
    rows = piece.shape[-2]
    values = dequantize(data[place * rows : (place + 1) * rows], stored.tensor_type)
    return torch.from_numpy(values.copy())
