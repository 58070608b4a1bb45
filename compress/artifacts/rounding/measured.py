"""What columns of weights multiply, as a walk along the blocks sees it.

It lies in a file of the working folder, so that a walk which goes on where another was stopped has
what all units before found. Memory holds that of one tensor at a time, also while a file for
llama-quantize is written of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.artifacts.rounding.block_file import BlockFile, BlockPlace
from compress.formats.gguf.layout import Piece
from compress_exporters.gguf.imatrix_write import Importance
from compress_exporters.gguf.plan import GgufPlan

FILE = "blocks.measured"
_FP32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredFile:
    """rows: of each tensor of the checkpoint one, of bytes: K mean squares in fp32, and of how many
    tokens they are, int64. head: the tensor that the output head multiplies by."""

    rows: BlockFile
    head: str

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.rows.places

    def write(self, tensor: str, mean: Tensor, tokens: int) -> None:
        """mean: squares, fp32 [K]. OutputError where the disk refuses."""
        row = (mean.cpu().contiguous().view(torch.uint8), torch.tensor([tokens]).view(torch.uint8))
        self.rows.write(tensor, torch.cat(row)[None])

    def read(self, tensor: str) -> tuple[Tensor, Tensor]:
        """Mean squares fp32 [K] and tokens int64 []. OutputError where they are gone."""
        (row,) = self.rows.rows(tensor, 0, 1)
        mean, tokens = row[:-_INT64], row[-_INT64:]
        return mean.clone().view(torch.float32), tokens.clone().view(torch.int64)[0]


def measured_file(plan: GgufPlan, folder: Path) -> MeasuredFile:
    """With a place for each matrix that hidden states are multiplied by. folder: of the work."""
    places, start = {}, 0
    for piece in plan.multiplied:
        width = _FP32 * piece.shape[-1] + _INT64
        for tensor in piece.sources:
            places[tensor] = BlockPlace(start, 1, width)
            start += width
    return MeasuredFile(BlockFile(folder / FILE, places), plan.head.sources[0])


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredImportance(Mapping[str, Importance]):
    """pieces: by name of the tensor in GGUF, experts one after the other. What is asked for is read
    from the file, and not kept: OutputError where it is gone."""

    pieces: Mapping[str, Piece]
    found: MeasuredFile

    def __getitem__(self, name: str) -> Importance:
        read = (self.found.read(tensor) for tensor in self.pieces[name].sources)
        means, tokens = zip(*read, strict=True)
        return Importance(torch.stack(means), torch.stack(tokens))

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)


def importance_of(pieces: Sequence[Piece], found: MeasuredFile) -> Mapping[str, Importance]:
    """By name of the tensor in GGUF, as long as the working folder is there."""
    return MeasuredImportance({piece.name: piece for piece in pieces}, found)
