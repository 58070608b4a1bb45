"""The source with its weights in blocks that know nothing of any input: what a GGUF file that was
rounded by data is measured beside."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats.weights import DenseWeights
from compress.plan.whole.file import BlocksPlan
from compress_kernels import decode_blocks, round_blocks

# Numbers that are rounded at once, 16 MB in fp32.
AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class PlainBlocks(DenseWeights):
    """A dense checkpoint whose planned weights read as blocks of their kind, each number at its
    nearest code, fp32. Nothing of it is written. modules: by tensor."""

    modules: Mapping[str, BlocksPlan]

    def read(self, tensor: str, *, check_finite: bool = False) -> Tensor:
        module = self.modules.get(tensor)
        weight = self.checkpoint.read(tensor, check_finite=check_finite)
        if module is None:
            return weight
        turned = module.linear.transposed
        rounded = _rounded(module, weight.t() if turned else weight)
        return rounded.t().contiguous() if turned else rounded

    def read_rows(
        self, tensor: str, start: int, stop: int, *, check_finite: bool = False
    ) -> Tensor:
        module = self.modules.get(tensor)
        if module is not None and module.linear.transposed:
            return self.read(tensor, check_finite=check_finite)[start:stop]
        rows = self.checkpoint.read_rows(tensor, start, stop, check_finite=check_finite)
        return rows if module is None else _rounded(module, rows)


def _rounded(module: BlocksPlan, weight: Tensor) -> Tensor:
    """weight: [n, K]; fp32 of that shape."""
    rounded = torch.empty(weight.shape)
    step = max(1, AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = weight[start : start + step].float().contiguous()
        rounded[start : start + step] = decode_blocks(
            module.kind, round_blocks(module.kind, rows, None)
        )
    return rounded
