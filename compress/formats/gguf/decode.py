"""Numbers of a GGUF file's tensors from their bytes."""

import torch
from torch import Tensor

from compress_kernels import decode_blocks

# Types that are stored as plain numbers; all others are blocks.
PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def decode(kind: str, data: Tensor, rows: int) -> Tensor:
    """data: uint8 [bytes] of so many whole rows -> their numbers [rows, K]: fp32, to the bit what
    ggml decodes; in 16 bits where they are stored so."""
    if kind in PLAIN:
        return data.view(PLAIN[kind]).view(rows, -1)
    return decode_blocks(kind, data.view(rows, -1))
