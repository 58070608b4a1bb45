"""llama.cpp's blocks: in panels, which products read as they are, or decoded once."""

from dataclasses import dataclass, replace

from torch import Tensor

from compress.quant.blocks import BlockTensor
from compress.quant.tensor import InputQuantization
from compress.runtime.forms.decoded import as_dense
from compress.runtime.forms.dense import DenseForm
from compress.runtime.forms.form import Arithmetic, LinearFacts, LinearWeight
from compress.runtime.forms.input_rounding import rounded
from compress.runtime.forms.panels import why_no_panels
from compress_kernels.block_panels import block_panel_bytes, block_panels
from compress_kernels.ops.packed import layout_for, packed_linear
from compress_kernels.panels import Math, Panels, joined
from compress_kernels.rounding import RowRounding


@dataclass(frozen=True, slots=True, eq=False)
class BlockPanels:
    """kind: the type of the blocks. math: of products."""

    panels: Panels
    kind: str
    math: Math

    @property
    def shape(self) -> tuple[int, int]:
        return self.panels.shape

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    def rounding(self, inputs: InputQuantization | None) -> RowRounding | None:
        """Inputs that a scheme rounds are rounded before the product."""
        return None

    def matmul(self, x: Tensor, inputs: InputQuantization | None, bias: Tensor | None) -> Tensor:
        x = x if inputs is None else rounded(x, inputs)
        return packed_linear(x, self.panels, bias, self.math)

    def joined(self, others: tuple[LinearWeight, ...]) -> "BlockPanels | None":
        parts = [other for other in others if isinstance(other, BlockPanels)]
        if len(parts) < len(others) or any(part.kind != self.kind for part in parts):
            return None
        return replace(self, panels=joined([self.panels, *(part.panels for part in parts)]))


@dataclass(frozen=True, slots=True)
class BlockPanelsForm:
    """Takes every type. Codes of 3 and of 5 or 6 bits take 4 and 8 in memory, and whole scales of
    sub-blocks 8; numbers are multiplied by them as the engine's math says."""

    name: str = "codes in panels"
    joins: bool = True

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> str | None:
        return why_no_panels(how)

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        """Of outputs that only fill up, too."""
        assert facts.blocks is not None, "others have tables of their own"
        return block_panel_bytes(facts.blocks, facts.shape, layout_for(how.math, how.dtype))

    def pack(self, weight: BlockTensor, facts: LinearFacts, how: Arithmetic) -> BlockPanels:
        panels = block_panels(weight.kind, weight.data, layout_for(how.math, how.dtype))
        return BlockPanels(panels, weight.kind, how.math)


@dataclass(frozen=True, slots=True)
class DecodedBlocks:
    """Takes every type: dense weights of fp32 from then on."""

    name: str = "blocks that are decoded once"
    joins: bool = True

    def why_not(self, facts: LinearFacts, how: Arithmetic) -> None:
        return None

    def nbytes(self, facts: LinearFacts, how: Arithmetic) -> int:
        return DenseForm().nbytes(as_dense(facts), how)

    def pack(self, weight: BlockTensor, facts: LinearFacts, how: Arithmetic) -> LinearWeight:
        return DenseForm().pack(weight.decoded(), as_dense(facts), how)
