"""A token embedding in llama.cpp's blocks: a row is decoded when a token asks for it."""

from dataclasses import dataclass

from torch import Tensor

from compress.quant.blocks import BlockTensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """blocks: of a weight [N, K], in memory of their own."""

    blocks: BlockTensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape

    @property
    def nbytes(self) -> int:
        return self.blocks.data.nbytes

    def rows(self, index: Tensor) -> Tensor:
        """index: whole numbers [any] -> fp32 [any, K]."""
        return self.blocks.rows(index).decoded()
