"""E2M1 numbers (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two in a byte as NVFP4 has them.

A nibble is sign << 3 | index of the magnitude. The even column is the low nibble.
"""

import torch
from torch import Tensor

# As E4M3 bytes the magnitudes are 0x00, 0x30 and 0x38 + 4 * (index - 2): no table is needed.
_HALF, _STEP = 0x30, 4


def pack_fp4(codes: Tensor) -> Tensor:
    """uint8 [N, K / 2] of float8_e4m3fn codes [N, K] that hold E2M1 numbers only; K is even."""
    raw = codes.view(torch.uint8)
    magnitude = raw & 0x7F
    index = torch.where(magnitude >= 0x38, (magnitude - _HALF) // _STEP, magnitude >> 5)
    nibbles = index | (raw >> 7 << 3)
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    assert torch.equal(unpack_fp4(packed).view(torch.uint8), raw), "codes are not all E2M1 numbers"
    return packed


def unpack_fp4(packed: Tensor) -> Tensor:
    """float8_e4m3fn codes [N, K] of uint8 [N, K / 2]; every byte is two numbers."""
    nibbles = torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(1)  # [N, K]
    index = nibbles & 0x07
    magnitude = torch.where(index >= 2, index * _STEP + _HALF, index * _HALF)
    return (magnitude | (nibbles >> 3 << 7)).view(torch.float8_e4m3fn)
