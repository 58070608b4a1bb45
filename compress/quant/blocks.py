"""A weight in llama.cpp's blocks, as a GGUF file stores it."""

from dataclasses import dataclass

from torch import Tensor

from compress.quant.ggml_kinds import KINDS
from compress_kernels import decode_blocks
from compress_kernels.blocks.bytes import halves_of
from compress_kernels.blocks.layouts import LAYOUTS


@dataclass(frozen=True, slots=True, eq=False)
class BlockTensor:
    """A weight [N, K]. kind: its type, a key of KINDS with blocks. data: uint8 [N, bytes]."""

    kind: str
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        kind = KINDS[self.kind]
        return self.data.shape[0], self.data.shape[1] // kind.size * kind.block

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are: their codes and whole scales cannot make one that is not."""
        layout = LAYOUTS[self.kind]
        return bool(halves_of(layout, self.data.reshape(-1, layout.size)).isfinite().all())

    def rows(self, rows: slice | Tensor) -> "BlockTensor":
        return BlockTensor(self.kind, self.data[rows])

    def decoded(self) -> Tensor:
        """fp32 [N, K], to the bit what ggml decodes."""
        return decode_blocks(self.kind, self.data)


def in_blocks(code: str | None) -> bool:
    """Whether a dtype code, or a type of GGUF's, is one of blocks."""
    kind = None if code is None else KINDS.get(code)
    return kind is not None and kind.block > 1
